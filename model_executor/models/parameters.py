"""The parameters of a decoder, the checkpoint tensors that each is made from, and the part of it that a rank holds.

With tensor parallelism, several ranks compute one model. Attention heads and feed-forward features are divided equally
among them. Each layer then needs two sums over all ranks: the outputs of `o_proj` and of `down_proj`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...srt.model_files.experts_config import GGUF_NAMES
from ...srt.model_files.families import FAMILIES
from ...srt.model_files.family import Family
from ...srt.model_files.model_config import ModelConfig
from .convolution_parameters import convolution, convolution_linears
from .delta_net_parameters import FLOAT32_ENDINGS, delta_net, delta_net_linears
from .gemma4 import attention_parts, config_of_layer, end_parameters, input_parameters
from .latent_parameters import kv_b_proj, latent_linears, latent_norms
from .parameter import LinearParts, Parameter, Part, Shard, Split, half_split_order, stacked

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
"""The names of these two in a checkpoint."""
ROUTER_ENDING = ".router.weight"
SHARED_GATE_ENDING = ".shared_expert_gate.weight"
_SINKS_ENDING = ".sinks"
_CORRECTIONS_ENDING = ".router.corrections"
_FLOAT32_ENDINGS = (_SINKS_ENDING, _CORRECTIONS_ENDING, *FLOAT32_ENDINGS)


class ParameterDtypes(NamedTuple):
    """The types of the parameters that are not quantized."""

    vectors: torch.dtype
    """Of norms and biases. Attention sinks have float32, because attention computes its scores in it. Corrections have
    float32, because a small error may choose another expert."""
    matrices: torch.dtype
    routers: torch.dtype
    """Of mixtures of experts: float32, or that of other matrices."""

    def of(self, parameter: Parameter) -> torch.dtype:
        if parameter.name.endswith(ROUTER_ENDING):
            return self.routers
        if parameter.name.endswith(_FLOAT32_ENDINGS) or any(part.is_computed for part in parameter.parts):
            return torch.float32
        return self.matrices if len(parameter.shape) == 2 else self.vectors


def check_shard(config: ModelConfig, shard: Shard) -> None:
    """Raise ValueError unless there is such a rank, and the ranks can divide the model equally."""
    if not 0 <= shard.rank < shard.size:
        raise ValueError(f"rank must be in [0, {shard.size}) with {shard.size} ranks, got {shard.rank}")
    if shard.size > 1 and config.qk_norm == "rows":
        raise ValueError(
            f"{shard.size} ranks cannot divide {config.architecture}: its norms of queries and keys need all heads"
        )
    if shard.size > 1 and config.latent is not None:
        raise ValueError(f"{shard.size} ranks cannot divide {config.architecture}: its heads share their keys")
    if shard.size > 1 and config.delta_net is not None:
        raise ValueError(f"{shard.size} ranks cannot divide {config.architecture}: it has recurrent layers")
    if shard.size > 1 and config.gemma4 is not None:
        raise ValueError(f"{shard.size} ranks cannot divide {config.architecture}: its layers differ in their heads")
    divided = [(name, getattr(config, name)) for name in ("num_heads", "num_kv_heads")]
    if config.convolutions is not None:
        divided.append(("channels", config.convolutions.channels))
    divided += [("intermediate_size", width) for width in config.feed_forward_widths]
    if not config.tie_word_embeddings:
        divided.append(("vocab_size", config.vocab_size))
    for name, number in divided:
        if number % shard.size:
            raise ValueError(f"the number of ranks must divide {name}, but {number} is no multiple of {shard.size}")


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The config of a rank's part: its number of heads and its feed-forward width. Raises ValueError (check_shard).

    The vocabulary stays whole, because each rank embeds all tokens.
    """
    check_shard(config, shard)
    experts = config.experts
    if experts is not None:
        shared = experts.shared
        if shared is not None:
            shared = shared._replace(intermediate_size=shared.intermediate_size // shard.size)
        width = experts.intermediate_size // shard.size
        experts = dataclasses.replace(experts, intermediate_size=width, shared=shared)
    convolutions = config.convolutions
    if convolutions is not None:
        convolutions = convolutions._replace(channels=convolutions.channels // shard.size)
    return dataclasses.replace(
        config,
        experts=experts,
        convolutions=convolutions,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // shard.size,
        intermediate_size=config.intermediate_size // shard.size,
    )


def decoder_parameters(config: ModelConfig) -> list[Parameter]:
    """The parameters of the model that `config` describes, under the names that `Decoder` uses."""
    hidden, of_layers = config.hidden_size, _LayerParts.of(config)
    parameters = [_whole("embed_tokens.weight", EMBEDDING, (config.vocab_size, hidden))]
    if config.gemma4 is not None:
        parameters.extend(input_parameters(config))
    for index in range(config.num_layers):
        if config.gemma4 is None:
            parameters.extend(_layer(config, index, of_layers))
            continue
        own = _LayerParts.of(config_of_layer(config, index))
        norms, linears = attention_parts(config.gemma4, index, own.attention_norms, own.attention)
        parameters.extend(_layer(config, index, own._replace(attention_norms=norms, attention=linears)))
        parameters.extend(end_parameters(config, index))
    last_norm = FAMILIES[config.architecture].layer_names.last_norm
    part = Part(f"{last_norm}.weight", (hidden,), offset=config.norm_offset, factor=1 / config.logits_divisor)
    parameters.append(Parameter("norm.weight", (hidden,), (part,), Split.REPLICATED))
    if not config.tie_word_embeddings:
        parameters.append(_whole("lm_head.weight", LM_HEAD, (config.vocab_size, hidden), Split.COLUMNS))
    return parameters


class _LayerParts(NamedTuple):
    """What layers are made from, by the names of the model. Names of tensors lack their beginnings and endings."""

    norms: dict[str, Part]
    """of every layer"""
    attention_norms: dict[str, Part]
    attention: dict[str, LinearParts]
    others: dict[str, LinearParts]
    """around the mixer of a layer without attention"""
    dense: dict[str, LinearParts]
    """the feed-forward layer of a layer without experts"""

    @classmethod
    def of(cls, config: ModelConfig) -> _LayerParts:
        family = FAMILIES[config.architecture]
        order = None
        if config.rope.rotary_dim is not None or family.interleaved_rotary:
            order = half_split_order(config.head_dim, config.rope.rotary_dim, family.interleaved_rotary)
        return cls(
            norms=_norms(config, family),
            attention_norms=_attention_norms(config, family, order),
            attention=_attention_linears(config, family, order),
            others=_other_linears(config),
            dense=_dense_linears(config, family),
        )


def _other_linears(config: ModelConfig) -> dict[str, LinearParts]:
    """The linear layers around the mixer of a layer without attention."""
    if config.delta_net is not None:
        return delta_net_linears(config.delta_net, config.hidden_size)
    return {} if config.convolutions is None else convolution_linears(config.convolutions, config.hidden_size)


def _norms(config: ModelConfig, family: Family) -> dict[str, Part]:
    """The norms of the residual and of the outputs of layers."""
    names, norm = family.layer_names, Part("", (config.hidden_size,), offset=config.norm_offset)
    norms: dict[str, Part] = {}
    if config.input_norms:
        # In most families with norms of outputs, that of attention has the name of this one.
        is_taken = config.output_norms and names.feed_forward_norm in family.output_norm_names
        before_feed_forward = "pre_feedforward_layernorm" if is_taken else names.feed_forward_norm
        norms = {
            "input_norm": norm._replace(name=names.input_norm),
            "post_attention_norm": norm._replace(name=before_feed_forward),
        }
    if config.output_norms:
        output_norm = norm._replace(factor=config.output_norm_factor)
        norms |= {
            "attention_output_norm": output_norm._replace(name=family.output_norm_names[0]),
            "feed_forward_output_norm": output_norm._replace(name=family.output_norm_names[1]),
        }
    return norms


def _attention_norms(config: ModelConfig, family: Family, order: tuple[int, ...] | None) -> dict[str, Part]:
    """The norms of queries and keys, or of latents. `order`: `Part.head_order` of queries and keys."""
    norms: dict[str, Part] = {}
    if config.qk_norm is not None:
        of_rows, head_dim = config.qk_norm == "rows", config.head_dim
        heads = (config.num_heads, config.num_kv_heads) if of_rows else (1, 1)
        for name, stored, count in zip(("q_norm", "k_norm"), family.qk_norm_names, heads, strict=True):
            name_in_layer, shape = f"self_attn.{stored}", (count * head_dim,)
            norms[name] = Part(name_in_layer, shape, offset=config.norm_offset, head_order=order)
    return norms if config.latent is None else norms | latent_norms(config.latent)


def _attention_linears(config: ModelConfig, family: Family, order: tuple[int, ...] | None) -> dict[str, LinearParts]:
    """The linear layers around attention. `order`: `Part.head_order` of queries and keys."""
    hidden, names = config.hidden_size, family.layer_names
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q = Part("self_attn.q_proj", (q_size,))
    k, v = Part("self_attn.k_proj", (kv_size,)), Part("self_attn.v_proj", (kv_size,))
    if family.stacked_qkv:
        q, k, v = stacked("self_attn.qkv_proj", q_size, kv_size, kv_size)
    parts = [q._replace(head_order=order), k._replace(head_order=order), v]
    if config.attention_gates == "heads":
        parts.append(Part(names.head_gates, (config.num_heads,)))
    if config.attention_gates == "components":
        head_dim = config.head_dim
        whole = parts[0]._replace(head_rows=2 * head_dim)
        parts[0] = whole._replace(head_order=order or tuple(range(head_dim)))
        parts.append(whole._replace(head_order=tuple(range(head_dim, 2 * head_dim))))
    out_size = config.num_heads * config.value_dim
    linears = {
        "qkv_proj": LinearParts(tuple(parts), hidden, config.qkv_bias, Split.COLUMNS),
        "o_proj": LinearParts((Part(names.o_proj, (hidden,)),), out_size, config.o_bias, Split.ROWS),
    }
    if config.latent is None:
        return linears
    return linears | latent_linears(config.latent, hidden, config.num_heads, interleaved=family.interleaved_rotary)


def _dense_linears(config: ModelConfig, family: Family) -> dict[str, LinearParts]:
    """The linear layers of a feed-forward layer."""
    hidden, inter, names = config.hidden_size, config.intermediate_size, family.layer_names
    gate, up = Part(names.gate, (inter,)), Part(names.up, (inter,))
    if family.stacked_gate_up:
        gate, up = stacked(names.gate_up, inter, inter)
    name, parts = ("gate_up_proj", (gate, up)) if config.has_gates else ("up_proj", (up,))
    return {
        name: LinearParts(parts, hidden, config.mlp_bias, Split.COLUMNS),
        "down_proj": LinearParts((Part(names.down, (hidden,)),), inter, config.mlp_bias, Split.ROWS),
    }


def _layer(config: ModelConfig, index: int, of_layers: _LayerParts) -> Iterator[Parameter]:
    """The parameters of a layer."""
    source = f"model.layers.{index}."
    has_attention, is_sparse = config.has_attention(index), config.is_sparse(index)
    norms = of_layers.norms | of_layers.attention_norms if has_attention else of_layers.norms
    for name, part in norms.items():
        stored = part._replace(name=f"{source}{part.name}.weight")
        yield Parameter(f"layers.{index}.{name}.weight", part.shape, (stored,), Split.REPLICATED)
    if not has_attention and config.delta_net is not None:
        yield from delta_net(config.delta_net, index, source)
    elif not has_attention:
        assert config.convolutions is not None
        yield from convolution(config.convolutions, index, source, is_gguf=config.load_format == "gguf")
    if FAMILIES[config.architecture].attention_sinks:
        yield _whole(sinks_name(index), f"{source}self_attn.sinks", (config.num_heads,), Split.COLUMNS)
    if config.latent is not None:
        yield kv_b_proj(config.latent, index, source, config.num_heads)
    linears = of_layers.attention if has_attention else of_layers.others
    for name, (parts, columns, bias, split) in (linears if is_sparse else linears | of_layers.dense).items():
        rows = sum(part.shape[0] for part in parts)
        weights = tuple(_renamed(part, f"{source}{part.name}.weight", columns) for part in parts)
        yield Parameter(f"layers.{index}.{name}.weight", (rows, columns), weights, split)
        if bias:
            biases = tuple(_renamed(part, f"{source}{part.name}.bias") for part in parts)
            bias_split = Split.FIRST_RANK if split is Split.ROWS else split
            yield Parameter(f"layers.{index}.{name}.bias", (rows,), biases, bias_split)
    if is_sparse:
        yield from _experts(config, index)


def sinks_name(layer: int) -> str:
    """The name of the attention sinks of a layer, float32 [num_heads]."""
    return f"layers.{layer}{_SINKS_ENDING}"


def router_name(layer: int) -> str:
    """The name of the router's weight, [num_experts, hidden]."""
    return f"layers.{layer}{ROUTER_ENDING}"


def corrections_name(layer: int) -> str:
    """The name of what is added to the weights of a router for the choice, float32 [num_experts]."""
    return f"layers.{layer}{_CORRECTIONS_ENDING}"


def expert_names(layer: int, expert: int) -> tuple[str, str]:
    """The names of an expert's two weights: gate and up [2 * inter, hidden], down [hidden, inter]."""
    prefix = f"layers.{layer}.experts.{expert}."
    return f"{prefix}gate_up_proj.weight", f"{prefix}down_proj.weight"


def shared_expert_names(layer: int) -> tuple[str, str]:
    """The names of the two weights of the shared expert, as those of an expert."""
    prefix = f"layers.{layer}.shared_expert."
    return f"{prefix}gate_up_proj.weight", f"{prefix}down_proj.weight"


def shared_gate_name(layer: int) -> str:
    """The name of the weight of the shared expert's gate, [1, hidden]."""
    return f"layers.{layer}{SHARED_GATE_ENDING}"


def bias_name(weight_name: str) -> str:
    """The name of the bias beside a weight."""
    return f"{weight_name.removesuffix('weight')}bias"


def is_expert(name: str) -> bool:
    """Whether a parameter is a weight or a bias of an expert that the router may choose."""
    return ".experts." in name


def _experts(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    """The parameters of a sparse layer."""
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    count, shared = experts.num_experts, experts.shared
    names = GGUF_NAMES if config.load_format == "gguf" else FAMILIES[config.architecture].expert_names
    source = f"model.layers.{layer}."

    def matrices(of: tuple[str, str], prefix: str, inter: int, expert: int = 0, in_tensor: int = 1) -> list[Parameter]:
        """The weights of an expert. `in_tensor`: how many experts have their rows in a tensor; `expert`: its place."""
        gate_up = _expert_parts(source + prefix, (names.gate, names.up), (inter, hidden), expert, in_tensor)
        down = _expert_parts(source + prefix, (names.down,), (hidden, inter), expert, in_tensor)
        return [
            Parameter(of[0], (2 * inter, hidden), gate_up, Split.COLUMNS),
            Parameter(of[1], (hidden, inter), down, Split.ROWS),
        ]

    def with_bias(weight: Parameter, split: Split) -> Iterator[Parameter]:
        yield weight
        if experts is not None and experts.has_biases:
            biases = tuple(part._replace(name=bias_name(part.name), shape=part.shape[:1]) for part in weight.parts)
            yield Parameter(bias_name(weight.name), weight.shape[:1], biases, split)

    router = _whole(router_name(layer), f"{source}{names.router}.weight", (count, hidden))
    yield from with_bias(router, Split.REPLICATED)
    if experts.has_corrections:
        part = Part(source + names.corrections, (count,), is_only_row=names.corrections_in_row)
        yield Parameter(corrections_name(layer), part.shape, (part,), Split.REPLICATED)
    for expert in range(count):
        prefix, place = f"{names.experts}{expert}.", (0, 1)
        if names.has_rows_of_all:
            prefix, place = names.experts, (expert, count)
        gate_up, down = matrices(expert_names(layer, expert), prefix, experts.intermediate_size, *place)
        yield from with_bias(gate_up, Split.COLUMNS)
        yield from with_bias(down, Split.FIRST_RANK)
    if shared is not None:
        yield from matrices(shared_expert_names(layer), names.shared, shared.intermediate_size)
        if shared.has_gate:
            yield _whole(shared_gate_name(layer), f"{source}{names.shared_gate}.weight", (1, hidden))


def _expert_parts(
    prefix: str, modules: tuple[str, ...], shape: tuple[int, int], expert: int, num_experts: int
) -> tuple[Part, ...]:
    """The parts of the `expert`-th of `num_experts` experts whose rows are in tensors named after `modules`."""
    of_expert = len(modules) // len(set(modules))  # its matrices in a tensor
    firsts = (expert * of_expert + place % of_expert for place in range(len(modules)))
    return tuple(
        Part(f"{prefix}{module}.weight", shape, first * shape[0], num_experts * of_expert * shape[0])
        for module, first in zip(modules, firsts, strict=True)
    )


def _renamed(part: Part, name: str, *columns: int) -> Part:
    return part._replace(name=name, shape=(*part.shape, *columns))


def _whole(name: str, checkpoint_name: str, shape: tuple[int, ...], split: Split = Split.REPLICATED) -> Parameter:
    return Parameter(name, shape, (Part(checkpoint_name, shape),), split)
