"""The name of a model whose path is all that is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercet.srt.model_files.model_name import model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/data/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("models/Qwen3-0.6B/config.json", "Qwen3-0.6B"),
        ("models/qwen3.gguf", "qwen3"),
        ("models/qwen3-00001-of-00003.gguf", "qwen3"),
        ("models/qwen3-1-of-3.gguf", "qwen3-1-of-3"),
        ("models/-00001-of-00003.gguf", "-00001-of-00003"),
        ("presets/qwen3-0.6b.json", "qwen3-0.6b"),
        ("/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12", "Qwen/Qwen3-0.6B"),
        ("/hub/models--gpt2/snapshots/607a30d783dfa663", "gpt2"),
    ],
)
def test_the_folder_or_file_names_the_model(path: str, name: str) -> None:
    assert model_name(path) == name


def test_the_current_folder_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name(".") == tmp_path.name
