"""Parameters from a checkpoint, or random ones.

On a CPU, a parameter is read when a layer asks for it and is held by that layer alone: one that packs what it is given
leaves nothing of the checkpoint in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from ..srt.model_config import ModelConfig
from .models.parameters import EMBEDDING, LM_HEAD, Parameter, decoder_parameters
from .safetensors_weights import SafetensorsCheckpoint
from .weight_cache import WeightCache

# Tensors that old checkpoints carry and every implementation computes anew.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DUMMY_STD = 0.02


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names."""

    names: frozenset[str]

    def tensor(self, name: str) -> torch.Tensor:
        """On the CPU, any floating dtype; read when asked for. Raises ValueError for another dtype."""


def checkpoint_dtype(config: ModelConfig) -> str | None:
    """What the config says, else the dtype of the embedding in the files; None without files (dummy)."""
    if config.dtype is not None or config.load_format != "safetensors":
        return config.dtype
    checkpoint = SafetensorsCheckpoint(config.model_path)
    return str(checkpoint.dtype(EMBEDDING)).removeprefix("torch.") if EMBEDDING in checkpoint.names else None


def load_parameters(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, cache: WeightCache | None = None
) -> Mapping[str, torch.Tensor]:
    """Name -> tensor, as `decoder_parameters` lists them. `seed` is for dummy weights, `cache` for dequantised ones.

    Raises ValueError naming tensors that are missing or unexpected; on a CPU one that is of another shape than the
    config implies, or quantized, raises it when it is asked for.
    """
    if config.load_format == "dummy":
        return _dummy(decoder_parameters(config), dtype, device, seed)
    if config.load_format == "gguf":
        stored = _from_gguf(config, dtype, cache)
    else:
        stored = StoredParameters(SafetensorsCheckpoint(config.model_path), config, dtype)
    return stored if device.type == "cpu" else {name: tensor.to(device) for name, tensor in stored.items()}


def _from_gguf(config: ModelConfig, dtype: torch.dtype, cache: WeightCache | None) -> Mapping[str, torch.Tensor]:
    def dequantized() -> StoredParameters:
        from .gguf_weights import GGUFCheckpoint  # gguf takes a tenth of a second to import

        return StoredParameters(GGUFCheckpoint(config), config, dtype)

    if cache is None:
        return dequantized()
    return cache.parameters(config.model_path, decoder_parameters(config), dtype, dequantized)


class StoredParameters(Mapping[str, torch.Tensor]):
    """The parameters of a checkpoint. Each is read whenever it is asked for, and not kept.

    A parameter that the checkpoint has as it is, mapped and of the wanted dtype, is a view of the file; others are put
    together, part by part.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._parameters = {parameter.name: parameter for parameter in decoder_parameters(config)}
        needed = {part.name for parameter in self._parameters.values() for part in parameter.parts}
        _refuse("missing", needed - checkpoint.names)
        extra = {name for name in checkpoint.names - needed if not name.endswith(_IGNORED_SUFFIXES)}
        if config.tie_word_embeddings and LM_HEAD in extra:
            # Some savers write the tied matrix twice. If the copies differ, the config is wrong.
            if not torch.equal(checkpoint.tensor(LM_HEAD), checkpoint.tensor(EMBEDDING)):
                raise ValueError(f"tie_word_embeddings is set, but the checkpoint's {LM_HEAD} differs from {EMBEDDING}")
            extra.discard(LM_HEAD)
        _refuse("unexpected", extra)

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        if len(parameter.parts) == 1:
            return self._part(*parameter.parts[0]).to(self._dtype)
        whole = torch.empty(parameter.shape, dtype=self._dtype)
        row = 0
        for part in parameter.parts:
            whole[row : row + part.shape[0]] = self._part(*part)
            row += part.shape[0]
        return whole

    def _part(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the config implies {shape}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


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
