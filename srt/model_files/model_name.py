"""The name of a model whose path is all that is known."""

from __future__ import annotations

import os
import re
from pathlib import Path


def model_name(model_path: str) -> str:
    """The name of the model's folder or GGUF file, without the folders above it.

    A part of a split .gguf file has the name of the whole file. A model in Hugging Face's cache has the name of its
    repository: `ORG/NAME` for `models--ORG--NAME/snapshots/REVISION`.
    """
    path = Path(os.path.abspath(model_path))
    if path.name == "config.json":
        path = path.parent
    if path.suffix == ".gguf":
        return re.sub(r"(?<=.)-\d{5}-of-\d{5}$", "", path.stem)
    if path.suffix == ".json":
        return path.stem
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name
