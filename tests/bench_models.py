"""A tiny model for tests of benchmarks, and a reader of a benchmark's JSON line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "use_sliding_window": False,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def tiny_flags(folder: Path) -> list[str]:
    """The flags of an engine with the tiny model."""
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    return ["--model-path", str(path), "--device", "cpu", "--dtype", "float32", "--max-total-tokens", "1000"]


def json_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON of the last line that was printed since the last call."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found
