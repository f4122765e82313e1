"""Configs of Seed-OSS, which has a key of its own for the bias of the output of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_models import write_gguf
from hf_configs import assert_equals_transformers, load
from tiny_models import make_model
from transformers import AutoConfig

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

# The config.json of Seed-OSS-36B-Instruct.
SEED_OSS: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attention_out_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 27648,
    "max_position_embeddings": 524288,
    "mlp_bias": False,
    "model_type": "seed_oss",
    "num_attention_heads": 80,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "pad_token_id": 1,
    "residual_dropout": 0.1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 155136,
}
BARE = {
    "model_type": "seed_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    return config.qkv_bias, config.o_bias, config.mlp_bias


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, SEED_OSS)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (64, 80, 8, 128)
    assert biases(config) == (True, False, False) and config.rope.theta == 1e7
    assert (config.bos_token_id, config.eos_token_ids) == (0, (2,))


def test_each_bias_has_its_key(tmp_path: Path) -> None:
    names = "attention_bias", "attention_out_bias", "mlp_bias"
    for place, name in enumerate(names):
        config = load(tmp_path, SEED_OSS | dict.fromkeys(names, False) | {name: True})
        assert biases(config) == tuple(other == place for other in range(3))
    with pytest.raises(ValueError, match="attention_out_bias must be true or false, got 1"):
        load(tmp_path, SEED_OSS | {"attention_out_bias": 1})


@pytest.mark.parametrize("given", [{}, {"head_dim": None}, {"num_key_value_heads": None}], ids=str)
def test_defaults_are_those_of_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    keys = BARE | given
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert biases(config) == (theirs.attention_bias, theirs.attention_out_bias, theirs.mlp_bias) == (True, False, False)
    theirs.attention_bias = False  # the comparison takes it for that of the output, too
    assert_equals_transformers(load(tmp_path, keys | {"attention_bias": False}), theirs)
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


def test_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window is not supported"):
        load(tmp_path, SEED_OSS | {"sliding_window": 4096})


def test_gguf(tmp_path: Path) -> None:
    def of(name: str, **keys: Any) -> ModelConfig:
        return load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), "seed_oss", keys=keys))

    assert biases(of("seed_oss")) == (True, False, True) and biases(of("seed_oss_out")) == (False, True, False)
    assert of("seed_oss").architecture == "SeedOssForCausalLM" and of("seed_oss").head_dim == 24
    with pytest.raises(ValueError, match=r"attention\.sliding_window must be 0 or absent, got 7"):
        of("seed_oss", **{"attention.sliding_window": 7})
