"""Presets: the config.json files of published models, for benchmarks with random weights and without a tokenizer.

A benchmark's `--model-path` accepts a preset's name or a path. A preset's path also works as a model path elsewhere:

    tercet serve "$(python -m tercet.benchmarks.presets qwen3-0.6b)" --load-format dummy --skip-tokenizer-init
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.model_config import ModelConfig

_FOLDER = Path(__file__).with_name("presets")
DEFAULT_PRESET = "smollm2-135m"
"""The shape of the default model."""
PRESETS = tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def model_path(model: str) -> str:
    """The path of a preset's config.json, or `model` itself if it is a path. Raises ValueError."""
    if model in PRESETS:
        return str(_FOLDER / f"{model}.json")
    if not os.path.exists(model):  # False also for a name that no file can have
        raise ValueError(f"--model-path must be a path or one of {', '.join(PRESETS)}, got {model!r}")
    return model


def load_shape(model: str) -> ModelConfig:
    """The model's configuration, for random weights. Raises ValueError or FileNotFoundError."""
    return load_model_config(model_path(model), "dummy")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the path of each named preset, or the names of all presets. Returns the exit code."""
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
