"""Configs of EXAONE 4, in which a window decides which layers have a rotary embedding."""

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
from tercet.srt.model_files.rope_config import NO_ROTATION, Llama3Scaling

LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# What matters of the config.json of EXAONE-4.0-32B.
EXAONE: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 361,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "max_position_embeddings": 131072,
    "model_type": "exaone4",
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3,
    "rope_theta": 1000000,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}
BARE = {
    "model_type": "exaone4",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def rotated(config: ModelConfig) -> list[bool]:
    return [rope != NO_ROTATION for rope in config.ropes]


def test_a_published_model(tmp_path: Path) -> None:
    config = load(tmp_path, EXAONE)
    assert config.sliding_windows == (4096, 4096, 4096, None) * 16
    assert rotated(config) == [True, True, True, False] * 16
    assert isinstance(config.rope.scaling, Llama3Scaling) and config.rope.theta == 1e6
    assert (config.qk_norm, config.input_norms, config.output_norms) == ("heads", False, True)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias)


def test_only_layers_with_a_window_are_rotated(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"] * 32
    assert rotated(load(tmp_path, EXAONE | {"layer_types": types})) == [False, True] * 32
    none = EXAONE | {"layer_types": ["full_attention"] * 64}
    assert rotated(load(tmp_path, none)) == [False] * 64
    assert rotated(load(tmp_path, none | {"sliding_window": None})) == [True] * 64


def test_a_model_without_a_window(tmp_path: Path) -> None:
    """As EXAONE-4.0-1.2B. Its pattern is absent, or has no meaning."""
    config = load(tmp_path, BARE | {"sliding_window": None, "sliding_window_pattern": None})
    assert config.sliding_windows == (None,) * 5 and rotated(config) == [True] * 5


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config, theirs = load(tmp_path, BARE), AutoConfig.for_model(**BARE)
    assert config.sliding_windows == (4096, 4096, 4096, None, 4096)
    assert (config.bos_token_id, config.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))
    assert config.num_kv_heads == theirs.num_key_value_heads and config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    pattern = BARE | {"sliding_window_pattern": 2, "sliding_window": 7}
    assert load(tmp_path, pattern).sliding_windows == (7, None, 7, None, 7)


@pytest.mark.parametrize("name", ["exaone4", "exaone4_types", "exaone4_full"])
def test_what_transformers_writes(name: str, tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    windows = [source.sliding_window if kind == "sliding_attention" else None for kind in source.layer_types]
    assert config.sliding_windows == tuple(windows)
    assert rotated(config) == [source.sliding_window is None or window is not None for window in windows]
    if all(rotated(config)):
        assert_equals_transformers(config, source)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None}, "layer_types with sliding_attention needs sliding_window"),
        ({"layer_types": None}, "sliding_window_pattern must be an integer from 1 to .*, got 'LLLG'"),
        ({"layer_types": ["full_attention"]}, "for each of 64 layers"),
        ({"attention_bias": True}, "attention_bias is not supported for Exaone4ForCausalLM"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, EXAONE | changes)


def test_gguf(tmp_path: Path) -> None:
    def of(name: str, **keys: Any) -> ModelConfig:
        return load_model_config(write_gguf(tmp_path / "m.gguf", make_model(name), "exaone4", keys=keys))

    config = of("exaone4")
    assert config.architecture == "Exaone4ForCausalLM" and config.qk_norm == "heads" and config.head_dim == 24
    assert config.sliding_windows == (7, 7, 7, None, 7) and rotated(config) == [True, True, True, False, True]
    assert rotated(of("exaone4_types")) == [False, True, False] and rotated(of("exaone4_full")) == [True] * 3
    unnamed = of("exaone4", **{"attention.sliding_window_pattern": None})
    assert unnamed.sliding_windows == config.sliding_windows
    none = of("exaone4", **{"attention.sliding_window_pattern": [False] * 5})
    assert none.sliding_windows == (None,) * 5 and rotated(none) == [False] * 5
