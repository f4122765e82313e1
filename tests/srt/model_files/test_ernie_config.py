"""Configs of dense ERNIE 4.5 models, which have one key for all biases."""

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
from tercet.srt.model_files.model_config import ModelConfig

BARE: dict[str, Any] = {
    "model_type": "ernie4_5",
    "architectures": ["Ernie4_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
    return config.qkv_bias, config.o_bias, config.mlp_bias


@pytest.mark.parametrize("given", [{}, {"head_dim": None}, {"num_key_value_heads": None}], ids=str)
def test_defaults_are_those_of_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    keys = BARE | given
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert_equals_transformers(config, theirs)
    assert config.tie_word_embeddings and config.rope.theta == 500_000
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


@pytest.mark.parametrize("has_biases", [False, True])
def test_one_key_for_all_biases(has_biases: bool, tmp_path: Path) -> None:
    assert biases(load(tmp_path, BARE | {"use_bias": has_biases})) == (has_biases,) * 3
    for key in ("attention_bias", "mlp_bias"):
        with pytest.raises(ValueError, match=f"{key} is not supported"):
            load(tmp_path, BARE | {key: True, "use_bias": has_biases})


@pytest.mark.parametrize("name", ["ernie4_5", "ernie4_5_biases"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.architectures = ["Ernie4_5ForCausalLM"]
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert biases(config) == (source.use_bias,) * 3 and config.head_dim == source.head_dim
    assert config.tie_word_embeddings == source.tie_word_embeddings
    assert config.rope.theta == source.rope_parameters["rope_theta"]


def test_gguf(tmp_path: Path) -> None:
    config = load_model_config(write_gguf(tmp_path / "m.gguf", make_model("ernie4_5"), "ernie4_5"))
    assert config.architecture == "Ernie4_5ForCausalLM" and config.head_dim == 24 and biases(config) == (False,) * 3
