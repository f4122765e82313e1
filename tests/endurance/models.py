"""The models that a run may serve."""

from __future__ import annotations

from pathlib import Path

from tercet.benchmarks.peers.models import make_toy
from tercet.srt.model_files.default_model import require_default_model


def model_flags(name: str, folder: Path) -> list[str]:
    """The flags for `default`, for `toy`, which is made in `folder`, or for a path."""
    if name == "default":
        return ["--model-path", str(require_default_model())]
    if name == "toy":
        return ["--model-path", str(make_toy(folder / "toy.gguf"))]
    return ["--model-path", name]
