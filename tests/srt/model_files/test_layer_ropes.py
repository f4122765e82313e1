"""Configs of models in which some layers have no rotary embedding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_configs import CONFIGS

from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import NO_ROTATION

SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 131,
}


def load(folder: Path, **keys: object) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SMOLLM3 | keys))
    return load_model_config(folder)


def rotated(config: ModelConfig) -> list[bool]:
    assert set(config.ropes) <= {config.rope, NO_ROTATION}
    return [rope != NO_ROTATION for rope in config.ropes]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm3", [True, False, True]),
        ("smollm3_default", [True, True, True, False]),
        ("smollm3_window", [False, True, False]),
        ("llama", [True, True, True]),
    ],
)
def test_what_transformers_writes(name: str, expected: list[bool], tmp_path: Path) -> None:
    source = CONFIGS[name]()
    source.architectures = [f"{type(source).__name__.removesuffix('Config')}ForCausalLM"]
    source.save_pretrained(tmp_path)
    assert rotated(load_model_config(tmp_path)) == expected


def test_layers_by_interval_and_by_list(tmp_path: Path) -> None:
    bare = load(tmp_path)
    assert rotated(bare) == [True, True, True, False, True]
    assert bare.rope.theta == 2e6 and bare.num_kv_heads == 4 and bare.tie_word_embeddings
    assert rotated(load(tmp_path, no_rope_layer_interval=2)) == [True, False, True, False, True]
    given = [1, 0, 0, 1, 1, 0]
    found = load(tmp_path, no_rope_layers=given, no_rope_layer_interval=2)
    assert rotated(found) == [True, False, False, True, True]
    for wrong in (given[:4], [*given[:4], 2], "10011", [1, 0, 0, 1, None]):
        with pytest.raises(ValueError, match="no_rope_layers"):
            load(tmp_path, no_rope_layers=wrong)


def test_layers_without_rotation_have_the_window(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 6}
    assert load(tmp_path, **window).sliding_windows == (None, None, None, 6, None)
    assert load(tmp_path, sliding_window=6).sliding_windows == (None,) * 5
    types = ["sliding_attention"] + ["full_attention"] * 4
    assert load(tmp_path, layer_types=types, **window).sliding_windows == (6, None, None, None, None)
    with pytest.raises(ValueError, match="needs use_sliding_window and sliding_window"):
        load(tmp_path, layer_types=types, sliding_window=6)
