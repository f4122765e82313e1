"""Configs of OLMo, whose layers normalise their outputs, and combinations of norms that no model has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from toy_runner import TOY
from transformers import AutoConfig

from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig

# The config.json of OLMo-2-0425-1B.
OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": False,
    "vocab_size": 100352,
}
BARE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}
EXPERTS = ExpertsConfig(num_experts=3, num_experts_per_token=2, intermediate_size=16, normalized=True)


def load(folder: Path, keys: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(keys))
    return load_model_config(folder)


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, OLMO2)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (16, 16, 16, 128)
    assert config.output_norms and not config.input_norms and config.qk_norm == "rows"
    assert config.rope.theta == 500000 and config.rms_norm_eps == 1e-6 and config.sliding_windows == (None,) * 16
    assert config.eos_token_ids == (100257,) and not (config.tie_word_embeddings or config.qkv_bias or config.o_bias)


@pytest.mark.parametrize("model_type", ["olmo2"])
def test_defaults_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    keys = BARE | {"model_type": model_type}
    config, theirs = load(tmp_path, keys), AutoConfig.for_model(**keys)
    assert config.num_kv_heads == theirs.num_key_value_heads and config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings and config.qkv_bias == theirs.attention_bias
    assert config.eos_token_ids == (theirs.eos_token_id,) and config.bos_token_id == theirs.bos_token_id
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]


def test_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="sliding_window is not supported with this architecture"):
        load(tmp_path, OLMO2 | {"sliding_window": 4096})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_norms": False}, "without norms of their inputs and outputs"),
        ({"output_norms": True, "experts": EXPERTS}, "norms of outputs are not supported in a mixture of experts"),
        ({"embedding_scale": 2.0}, "scaled embeddings are not supported without norms"),
        ({"embedding_scale": 2.0, "input_norms": False, "output_norms": True}, "scaled embeddings are not supported"),
    ],
)
def test_norms_that_the_decoder_would_ignore_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupported, match=message):
        dataclasses.replace(TOY, **changes)
