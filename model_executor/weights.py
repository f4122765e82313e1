"""Parameters from a checkpoint, or random ones.

Each tensor of a checkpoint is read where the file is mapped and copied once, into its place in the parameter it is a
part of, converted to the wanted dtype on the way. Nothing else of the checkpoint is ever in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..srt.model_config import ModelConfig
from .gguf_weights import GGUFCheckpoint
from .models.parameters import EMBEDDING, LM_HEAD, Parameter, decoder_parameters

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Tensors that old checkpoints carry and every implementation computes anew.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DUMMY_STD = 0.02


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names."""

    names: frozenset[str]

    def tensor(self, name: str) -> torch.Tensor:
        """On the CPU, any floating dtype; read when asked for."""


class SafetensorsCheckpoint:
    """The safetensors files of a Hugging Face directory, mapped. Raises ValueError, FileNotFoundError."""

    def __init__(self, folder: str) -> None:
        self._files = {}
        self._file_of: dict[str, str] = {}
        wanted = None
        index_path = os.path.join(folder, _INDEX)
        if os.path.exists(index_path):
            with open(index_path, encoding="utf-8") as file:
                wanted = json.load(file)["weight_map"]
            filenames = sorted(set(wanted.values()))
        else:
            filenames = _safetensors_without_index(folder)
        for filename in filenames:
            path = os.path.join(folder, filename)
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path!r} is missing, but {_INDEX} names it")
            try:
                self._files[filename] = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"{path!r} is not a valid safetensors file: {error}") from None
            names = self._files[filename].keys()
            for name in names:
                if self._file_of.setdefault(name, filename) != filename:
                    raise ValueError(f"tensor {name!r} is in both {self._file_of[name]!r} and {filename!r}")
        if wanted is not None:
            _refuse("missing from the files that the index names", set(wanted) - set(self._file_of))
        self.names = frozenset(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor


def _safetensors_without_index(folder: str) -> list[str]:
    present = sorted(os.listdir(folder))
    if _SINGLE in present:
        return [_SINGLE]
    # Mistral's own format lies beside the Hugging Face one under this name, with other tensor names.
    found = [name for name in present if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if found:
        return found
    pickled = [name for name in present if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        raise ValueError(
            f"{folder!r} has weights in pickle files only ({', '.join(pickled[:3])}), which may run code when loaded; "
            "only safetensors and GGUF are read: convert them first"
        )
    raise FileNotFoundError(f"{folder!r} has no *.safetensors file")


def checkpoint_dtype(config: ModelConfig) -> str | None:
    """What the config says, else the dtype of the embedding in the files; None without files (dummy)."""
    if config.dtype is not None or config.load_format != "safetensors":
        return config.dtype
    checkpoint = SafetensorsCheckpoint(config.model_path)
    return str(checkpoint.tensor(EMBEDDING).dtype).removeprefix("torch.") if EMBEDDING in checkpoint.names else None


def load_parameters(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Name -> tensor, as `decoder_parameters` lists them. `seed` is for dummy weights.

    Raises ValueError naming tensors that are missing, unexpected, or of another shape than the config implies.
    """
    parameters = decoder_parameters(config)
    if config.load_format == "dummy":
        return _dummy(parameters, dtype, device, seed)
    if config.load_format == "gguf":
        return _from_checkpoint(GGUFCheckpoint(config), config, parameters, dtype, device)
    return _from_checkpoint(SafetensorsCheckpoint(config.model_path), config, parameters, dtype, device)


def _from_checkpoint(
    checkpoint: Checkpoint, config: ModelConfig, parameters: list[Parameter], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    needed = {part.name for parameter in parameters for part in parameter.parts}
    _refuse("missing", needed - checkpoint.names)
    extra = {name for name in checkpoint.names - needed if not name.endswith(_IGNORED_SUFFIXES)}
    if config.tie_word_embeddings and LM_HEAD in extra:
        # Some savers write the tied matrix twice. If the copies differ, the config is wrong.
        if not torch.equal(checkpoint.tensor(LM_HEAD), checkpoint.tensor(EMBEDDING)):
            raise ValueError(f"tie_word_embeddings is set, but the checkpoint's {LM_HEAD} differs from {EMBEDDING}")
        extra.discard(LM_HEAD)
    _refuse("unexpected", extra)

    loaded = {}
    for parameter in parameters:
        whole = torch.empty(parameter.shape, dtype=dtype, device=device)
        row = 0
        for part in parameter.parts:
            tensor = checkpoint.tensor(part.name)
            if tuple(tensor.shape) != part.shape:
                raise ValueError(
                    f"tensor {part.name!r} has shape {tuple(tensor.shape)}, the config implies {part.shape}"
                )
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {part.name!r} has dtype {tensor.dtype}: quantized weights are not supported")
            whole[row : row + part.shape[0]].copy_(tensor)
            row += part.shape[0]
        loaded[parameter.name] = whole
    return loaded


def _dummy(parameters: list[Parameter], dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for parameter in parameters:
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.name.endswith("norm.weight"):
            tensor.fill_(1)
        elif parameter.name.endswith(".bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, _DUMMY_STD, generator=generator)
        made[parameter.name] = tensor
    return made


def _refuse(what: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(f"tensors {what}: {', '.join(found[:5])}{more}")
