"""Where the models of a comparison are: each one's weights in every format that a server reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...srt.model_files.default_model import require_default_model


@dataclass(frozen=True)
class ModelFiles:
    """One model, the same bfloat16 weights in both."""

    name: str
    folder: Path
    """Hugging Face's format: config.json, model.safetensors, tokenizer"""
    gguf: Path

    @property
    def complete(self) -> bool:
        return self.folder.is_dir() and self.gguf.is_file()


DEFAULT, TOY = "default", "toy"


def model_files(name: str, where: Path) -> ModelFiles:
    return ModelFiles(name, where / name, where / f"{name}.bf16.gguf")


def quantized_file(name: str) -> Path | None:
    """The file that the default model's bfloat16 weights are made from; the toy model has none."""
    return require_default_model() if name == DEFAULT else None
