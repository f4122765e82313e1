"""Reads the config of a model from config.json, or from the metadata of a GGUF file.

A setting that the decoder would ignore is refused by name, so a model that starts is computed as it was trained.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Literal, TypeAlias

from .files import has_file, read_json_object
from .gguf_config import config_from_gguf
from .gguf_file import is_gguf
from .gguf_model import GGUFModel, has_name_of_later_part
from .hf_config import config_from_hf
from .model_config import ModelConfig
from .older_quantization import read_older_quantization
from .settings import Settings, some_of

LoadFormat: TypeAlias = Literal["auto", "safetensors", "gguf", "dummy"]


def load_model_config(model_path: str | os.PathLike[str], load_format: LoadFormat = "auto") -> ModelConfig:
    """Read the config of a Hugging Face directory, a GGUF file, or a single config.json (dummy weights only).

    Raises FileNotFoundError, ModelNotSupported for a model that Tercet cannot compute, and other ValueErrors.
    """
    path = os.fspath(model_path)
    if not os.path.exists(path):
        is_name = path.count("/") == 1 and not path.startswith((".", "/")) and not path.endswith((".gguf", ".json"))
        hint = f"; if it is a model of the Hub, first run: hf download {path} --local-dir FOLDER" if is_name else ""
        raise FileNotFoundError(
            f"{path!r} does not exist; give a directory with config.json, a GGUF file or a config.json{hint}"
        )
    is_dir = os.path.isdir(path)
    if is_gguf(path):
        if load_format == "safetensors":
            raise ValueError(f"load format safetensors does not fit the GGUF file {path!r}")
        return config_from_gguf(GGUFModel(path), "dummy" if load_format == "dummy" else "gguf")
    if not is_dir and not path.endswith(".json"):
        raise ValueError(f"{path!r} must be a directory with config.json, a GGUF file, or a config.json")
    if is_dir and load_format != "dummy":
        _refuse_folder_of_gguf_files(path)
    if load_format == "gguf":
        raise ValueError(f"load format gguf needs a GGUF file, got {path!r}")
    if not is_dir and load_format != "dummy":
        raise ValueError(
            f"{path!r} is a config without weights; use --load-format dummy, or give the model's directory"
        )
    folder = path if is_dir else os.path.dirname(path)
    config_path = os.path.join(path, "config.json") if is_dir else path
    generation_path = os.path.join(folder, "generation_config.json")
    generation = read_json_object(generation_path) if has_file(generation_path) else {}
    return config_from_hf(
        Settings(config_path, _read_config(config_path)),
        Settings(generation_path, generation),
        partial(read_older_quantization, folder),
        path,
        "dummy" if load_format == "dummy" else "safetensors",
    )


def _refuse_folder_of_gguf_files(folder: str) -> None:
    """Raise ValueError if GGUF files are the only weights in a folder, because each of them may be another model."""
    names = sorted(os.listdir(folder))
    models = [name for name in names if name.endswith(".gguf") and not has_name_of_later_part(name)]
    if models and not any(name.endswith(".safetensors") for name in names):
        raise ValueError(
            f"{folder!r} has no safetensors files; give the path of one of its GGUF files: {some_of(models, 3)}"
        )


def _read_config(path: str) -> dict[str, object]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path!r} is missing; give a directory with config.json, or a GGUF file") from None
