"""Shapes of published models, for benchmarks with random weights: config.json files, without weights or tokenizer.

A benchmark's `--model-path` takes a preset's name or a path. A preset's path is a model path like any other:

    tercet serve "$(python -m tercet.benchmarks.presets qwen3-0.6b)" --load-format dummy --skip-tokenizer-init
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ..srt.model_files.model_config import ModelConfig, load_model_config

_FOLDER = Path(__file__).with_name("presets")
PRESETS = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def model_path(model: str) -> str:
    """Path of a preset's config.json, or `model` itself where that is a path. Raises ValueError."""
    if model in PRESETS:
        return str(_FOLDER / f"{model}.json")
    if not Path(model).exists():
        raise ValueError(f"--model-path must be a path or one of {', '.join(PRESETS)}, got {model!r}")
    return model


def model_name(model: str) -> str:
    """What a table calls it."""
    path = Path(model)
    if path.name == "config.json":
        return path.parent.name
    return path.stem if path.suffix in (".json", ".gguf") else path.name


def load_shape(model: str) -> ModelConfig:
    """The model's configuration, with random weights. Raises ValueError, FileNotFoundError."""
    return load_model_config(model_path(model), "dummy")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the path of each preset that is named; all names when none is. Returns the exit code."""
    names = sys.argv[1:] if argv is None else argv
    try:
        lines = [model_path(name) for name in names] or list(PRESETS)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
