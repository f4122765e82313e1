"""Paths of the comparison's model files. Each model is there in every format that a server reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...srt.model_files.default_model import require_default_model


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model. Both formats have the same bfloat16 weights."""

    name: str
    folder: Path
    """Folder in Hugging Face's format: config.json, model.safetensors, tokenizer."""
    gguf: Path

    @property
    def complete(self) -> bool:
        return self.folder.is_dir() and self.gguf.is_file()


DEFAULT, TOY = "default", "toy"


def model_files(name: str, where: Path) -> ModelFiles:
    return ModelFiles(name, where / name, where / f"{name}.bf16.gguf")


def quantized_file(name: str) -> Path | None:
    """The quantized file from which the default model's bfloat16 weights are made; None for the toy model."""
    return require_default_model() if name == DEFAULT else None
