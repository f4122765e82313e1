"""Configs of Arcee's AFM models, whose feed-forward layers have no gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_configs import CONFIGS
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.rope_config import YarnScaling

# What matters of the config.json of AFM-4.5B.
AFM: dict[str, Any] = {
    "architectures": ["ArceeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "arcee",
    "num_attention_heads": 20,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 20.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "mscale": 1.0},
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128004,
}
BARE = {
    "model_type": "arcee",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, AFM)
    assert config.hidden_act == "squared_relu" and not config.has_gates
    assert isinstance(config.rope.scaling, YarnScaling) and config.rope.scaling.original_context_len == 4096
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias)


@pytest.mark.parametrize("given", [{}, {"head_dim": None}, {"num_key_value_heads": None}], ids=str)
def test_defaults_are_those_of_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    keys = BARE | given
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    assert config.hidden_act == "squared_relu"
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
def test_another_activation_is_refused(activation: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"hidden_act '{activation}' is not supported; supported: relu2$"):
        load(tmp_path, AFM | {"hidden_act": activation})


def test_a_layer_with_a_gate_has_another_activation(tmp_path: Path) -> None:
    changes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with pytest.raises(ValueError, match="hidden_act 'relu2' is not supported; supported: silu, "):
        load(tmp_path, AFM | changes)


@pytest.mark.parametrize("name", ["arcee", "arcee_biases"])
def test_gguf(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), "arcee"))
    assert config.architecture == "ArceeForCausalLM" and config.hidden_act == "squared_relu"
    assert (config.o_bias, config.mlp_bias) == (source.attention_bias, source.mlp_bias)
    assert config.tie_word_embeddings == source.tie_word_embeddings and config.head_dim == (source.head_dim or 16)
