"""The loader of parameters, from a checkpoint or random.

On a CPU a parameter is read when a layer asks for it, and only that layer holds it. A layer that packs its weight keeps
no part of the checkpoint in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ...srt.model_files.model_config import ModelConfig
from ..layers.quantized_weight import QuantizedWeight, quantize, stacked
from ..models.family import family_of
from ..models.parameters import EMBEDDING, LM_HEAD, Parameter
from .quantization import quantized_forms
from .safetensors_checkpoint import SafetensorsCheckpoint
from .weight_cache import WeightCache

# Tensors of old checkpoints that are computed instead of loaded.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DUMMY_STD = 0.02


class Checkpoint(Protocol):
    """The tensors of a model's files, by their Hugging Face names."""

    names: frozenset[str]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor of any floating dtype to the CPU. Raises ValueError for another dtype."""

    def quantized(self, name: str, form: str) -> QuantizedWeight | None:
        """Read a tensor in the quantized `form`, with the stored values. None if it is stored in another form."""


def checkpoint_dtype(config: ModelConfig) -> str | None:
    """The dtype in the config, or else that of the stored embedding. None without files (dummy weights)."""
    if config.dtype is not None or config.load_format != "safetensors":
        return config.dtype
    checkpoint = SafetensorsCheckpoint(config.model_path)
    return str(checkpoint.dtype(EMBEDDING)).removeprefix("torch.") if EMBEDDING in checkpoint.names else None


def load_parameters(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    cache: WeightCache | None = None,
    quantization: str | None = None,
) -> Mapping[str, Any]:
    """Load the family's parameters, by name: tensors, or QuantizedWeights for the names in `quantized_forms`.

    `seed`: seed of dummy weights. `cache`: cache of dequantised weights.

    Raises ValueError for missing and unexpected tensors, and for a tensor whose shape differs from the config's or
    whose type is not supported. On a CPU the latter two are raised when the parameter is read.
    """
    forms = quantized_forms(config, quantization)
    if config.load_format == "dummy":
        return _dummy(family_of(config).parameters(config), dtype, device, seed, forms)

    def stored() -> StoredParameters:
        return StoredParameters(_open(config), config, dtype, forms)

    # The cache keeps tensors of one dtype. Quantized parameters are read from the file itself.
    if config.load_format == "gguf" and cache is not None and not forms:
        parameters = cache.parameters(config.model_path, family_of(config).parameters(config), dtype, stored)
    else:
        parameters = stored()
    return parameters if device.type == "cpu" else {name: tensor.to(device) for name, tensor in parameters.items()}


def _open(config: ModelConfig) -> Checkpoint:
    if config.load_format != "gguf":
        return SafetensorsCheckpoint(config.model_path)
    from .gguf_checkpoint import GGUFCheckpoint  # importing gguf takes a tenth of a second

    return GGUFCheckpoint(config)


class StoredParameters(Mapping[str, Any]):
    """The parameters of a checkpoint. Each access reads the parameter, and none is kept.

    A parameter that is one mapped tensor of the right dtype is a view of the file. Others are converted and put
    together from their parts.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, forms: Mapping[str, str]
    ) -> None:
        """forms: quantized form of each parameter that is quantized."""
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._forms = forms
        self._parameters = {parameter.name: parameter for parameter in family_of(config).parameters(config)}
        needed = {part.name for parameter in self._parameters.values() for part in parameter.parts}
        _refuse("missing", needed - checkpoint.names)
        extra = {name for name in checkpoint.names - needed if not name.endswith(_IGNORED_SUFFIXES)}
        if config.tie_word_embeddings and LM_HEAD in extra:
            # Some programs save the tied matrix twice. If the copies differ, the config is wrong.
            if not torch.equal(checkpoint.tensor(LM_HEAD), checkpoint.tensor(EMBEDDING)):
                raise ValueError(f"tie_word_embeddings is set, but the checkpoint's {LM_HEAD} differs from {EMBEDDING}")
            extra.discard(LM_HEAD)
        _refuse("unexpected", extra)

    def __getitem__(self, name: str) -> Any:
        parameter = self._parameters[name]
        if name in self._forms:
            return stacked(self._quantized_part(*part, self._forms[name]) for part in parameter.parts)
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
        _check_shape(name, tensor.shape, shape)
        return tensor

    def _quantized_part(self, name: str, shape: tuple[int, ...], form: str) -> QuantizedWeight:
        as_stored = self._checkpoint.quantized(name, form)
        if as_stored is None:
            return quantize(self._part(name, shape), form)
        _check_shape(name, as_stored.shape, shape)
        return as_stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _check_shape(name: str, actual: torch.Size, implied: tuple[int, ...]) -> None:
    if tuple(actual) != implied:
        raise ValueError(f"tensor {name!r} has shape {tuple(actual)}, the config implies {implied}")


def _dummy(
    parameters: list[Parameter], dtype: torch.dtype, device: torch.device, seed: int, forms: Mapping[str, str]
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[str, Any] = {}
    for parameter in parameters:
        tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.name.endswith("norm.weight"):
            tensor.fill_(1)
        elif parameter.name.endswith(".bias"):
            tensor.zero_()
        else:
            tensor.normal_(0, _DUMMY_STD, generator=generator)
        form = forms.get(parameter.name)
        made[parameter.name] = tensor if form is None else quantize(tensor, form)
    return made


def _refuse(what: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ValueError(f"tensors {what}: {', '.join(found[:5])}{more}")
