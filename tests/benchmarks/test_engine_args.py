"""The model of a benchmark that runs an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tercet.benchmarks.engine_args import add_engine_arguments, engine_args
from tercet.srt.model_files import default_model
from tercet.srt.server_args import ServerArgs


def parsed(argv: list[str], **needs: bool) -> ServerArgs:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_args(parser, parser.parse_args(argv), **needs)


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


def test_a_benchmark_that_needs_only_a_shape_needs_no_installed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "find_default_model", lambda: None)
    unnamed = tmp_path / "unnamed.yaml"
    unnamed.write_text("page-size: 4\n")
    for argv in ([], ["--config", str(unnamed)]):
        args = parsed(argv, needs_only_shape=True)
        assert args.model_path.endswith("smollm2-135m.json") and args.load_format == "dummy"
    assert parsed(["--model-path", "qwen3-0.6b"], needs_only_shape=True).model_path.endswith("qwen3-0.6b.json")
