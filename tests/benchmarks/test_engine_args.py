"""The model of a benchmark that runs an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tercet.benchmarks.engine_args import add_engine_arguments, engine_args
from tercet.srt.model_files import default_model
from tercet.srt.server_args import ServerArgs


def parsed(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_args(parser, parser.parse_args(argv))


def test_the_default_model_is_used_if_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "find_default_model", lambda: Path("default.gguf"))
    named, unnamed = tmp_path / "named.yaml", tmp_path / "unnamed.yaml"
    named.write_text("model-path: other.gguf\n")
    unnamed.write_text("page-size: 4\n")
    assert parsed([]).model_path == parsed(["--config", str(unnamed)]).model_path == "default.gguf"
    assert parsed(["--config", str(named)]).model_path == "other.gguf"
    assert parsed(["--config", str(named), "--model-path", "qwen3-0.6b"]).model_path.endswith("qwen3-0.6b.json")


def test_without_the_default_model_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "find_default_model", lambda: None)
    with pytest.raises(SystemExit):
        parsed([])
    assert default_model.INSTALL_COMMAND in capsys.readouterr().err
