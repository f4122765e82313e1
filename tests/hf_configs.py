"""Loads a config.json, and compares it with the config that transformers makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig


def load(folder: Path, keys: dict[str, Any]) -> ModelConfig:
    """Loads a config.json with these keys, which it writes into the folder."""
    (folder / "config.json").write_text(json.dumps(keys))
    return load_model_config(folder)


def assert_equals_transformers(config: ModelConfig, theirs: Any) -> None:
    """Compares what most families have. `theirs`: the config of a language model."""
    for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(theirs, name), name
    sizes = theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == sizes
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    o_bias = getattr(theirs, "attention_bias", False)
    assert (config.qkv_bias, config.o_bias) == (getattr(theirs, "qkv_bias", o_bias), o_bias)
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * config.num_layers
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in types]
    assert config.sliding_windows == tuple(windows)
    ropes = [theirs.rope_parameters.get(kind, theirs.rope_parameters) for kind in types]
    assert [rope.theta for rope in config.ropes] == [rope["rope_theta"] for rope in ropes]
