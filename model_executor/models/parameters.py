"""The parameters of a decoder, and the checkpoint tensors that each is made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...srt.model_files.model_config import ModelConfig


class Part(NamedTuple):
    """A checkpoint tensor: its Hugging Face name and its shape."""

    name: str
    shape: tuple[int, ...]


class Parameter(NamedTuple):
    """A tensor of the model: checkpoint tensors stacked along the first dimension, so that one product serves all."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def decoder_parameters(config: ModelConfig) -> list[Parameter]:
    """The parameters of the model that `config` describes, under the names that `Decoder` uses."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    inter = config.intermediate_size
    # name: (((checkpoint name, rows), ...), columns, whether it has a bias)
    linears = {
        "qkv_proj": (
            (("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)),
            hidden,
            config.qkv_bias,
        ),
        "o_proj": ((("self_attn.o_proj", hidden),), q_size, config.o_bias),
        "gate_up_proj": ((("mlp.gate_proj", inter), ("mlp.up_proj", inter)), hidden, config.mlp_bias),
        "down_proj": ((("mlp.down_proj", hidden),), inter, config.mlp_bias),
    }
    vectors = {
        "input_norm": ("input_layernorm", hidden),
        "post_attention_norm": ("post_attention_layernorm", hidden),
    }
    if config.qk_norm:
        vectors |= {"q_norm": ("self_attn.q_norm", head_dim), "k_norm": ("self_attn.k_norm", head_dim)}

    def layer(index: int) -> Iterator[Parameter]:
        source = f"model.layers.{index}."
        for name, (checkpoint_name, size) in vectors.items():
            yield _whole(f"layers.{index}.{name}.weight", f"{source}{checkpoint_name}.weight", (size,))
        for name, (parts, columns, bias) in linears.items():
            rows = sum(size for _, size in parts)
            weights = tuple(Part(f"{source}{part}.weight", (size, columns)) for part, size in parts)
            yield Parameter(f"layers.{index}.{name}.weight", (rows, columns), weights)
            if bias:
                biases = tuple(Part(f"{source}{part}.bias", (size,)) for part, size in parts)
                yield Parameter(f"layers.{index}.{name}.bias", (rows,), biases)

    parameters = [_whole("embed_tokens.weight", EMBEDDING, (config.vocab_size, hidden))]
    for index in range(config.num_layers):
        parameters.extend(layer(index))
    parameters.append(_whole("norm.weight", "model.norm.weight", (hidden,)))
    if not config.tie_word_embeddings:
        parameters.append(_whole("lm_head.weight", LM_HEAD, (config.vocab_size, hidden)))
    return parameters


EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def _whole(name: str, checkpoint_name: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter(name, shape, (Part(checkpoint_name, shape),))
