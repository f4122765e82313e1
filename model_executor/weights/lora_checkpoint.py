"""The matrices of a LoRA adapter, read from a folder of PEFT and put together for the model's linear layers.

The model stacks matrices that a checkpoint has one by one, such as those of queries, keys and values. An adapter has an
A and a B for each of them. A checkpoint that stacks them already (Phi 3) has one A for all.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...srt.model_files.families import FAMILIES
from ...srt.model_files.family import Family
from ...srt.model_files.files import has_file
from ...srt.model_files.lora_config import LoraConfig, read_lora_config
from ...srt.model_files.model_config import ModelConfig
from ..layers.lora_layers import LoraShape, LoraWeight
from ..models.family import family_of
from ..models.parameter import Parameter, Part
from ..models.parameters import is_expert
from .quantization import is_linear
from .safetensors_checkpoint import in_language_model, is_for_images
from .safetensors_file import SafetensorsFile

_FILE, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_NAME = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(\.[^.]+)?\.weight")
"""PEFT puts a prefix before the name of a module. Some programs leave the name of the adapter before `weight`."""
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter in the memory of the host."""

    weights: Mapping[str, LoraWeight]
    """the matrices of each adapted parameter, float32, by its name"""
    fingerprint: str
    """a hash of the matrices with their scales, so of all that K and V depend on"""


class _Module(NamedTuple):
    """A matrix of the checkpoint that an adapter may change."""

    parameter: Parameter
    parts: tuple[Part, ...]
    """what it has of the parameter: all of one tensor"""


def lora_shapes(config: ModelConfig) -> dict[str, LoraShape]:
    """The shapes of the linear layers that an adapter may change, by the name of the weight.

    These are all but the gates of shared experts and the layers of experts that a router chooses.
    """
    shapes = {}
    for parameter in _adaptable(config):
        rows = tuple(sum(part.shape[0] for part in parts) for _, parts in _runs(parameter))
        shapes[parameter.name] = LoraShape(rows, parameter.shape[1], parameter.name.endswith("gate_up_proj.weight"))
    return shapes


def read_adapter(path: str, config: ModelConfig, max_rank: int) -> LoraAdapter:
    """Read the adapter in the folder `path` for the model of `config`.

    Raises ValueError if the adapter cannot be used, with what is wrong with it.
    """
    lora = read_lora_config(path)
    if lora.rank > max_rank:
        raise ValueError(f"{lora.source}: the rank is {lora.rank}, but --max-lora-rank is {max_rank}")
    modules = {name: module for parameter in _adaptable(config) for name, module in _modules(parameter)}
    matrices = _matrices(path, lora, modules, FAMILIES[config.architecture])
    weights: dict[str, LoraWeight] = {}
    for parameter in _adaptable(config):
        found = {name: matrices[name] for name, _ in _modules(parameter) if name in matrices}
        if found:
            weights[parameter.name] = _stacked(parameter, found, lora)
    return LoraAdapter(weights, _fingerprint(weights))


def _adaptable(config: ModelConfig) -> Iterator[Parameter]:
    for parameter in family_of(config).parameters(config):
        if is_linear(parameter) and not is_expert(parameter.name):
            yield parameter


def _modules(parameter: Parameter) -> Iterator[tuple[str, _Module]]:
    """The modules of a parameter by name."""
    for name in dict.fromkeys(part.name for part in parameter.parts):
        parts = tuple(part for part in parameter.parts if part.name == name)
        yield name.removesuffix(".weight"), _Module(parameter, parts)


def _runs(parameter: Parameter) -> list[tuple[str, list[Part]]]:
    """The neighbouring parts of each module, with its name. Each run has matrices A and B of its own, because a module
    may have others between its parts."""
    runs = itertools.groupby(parameter.parts, lambda part: part.name.removesuffix(".weight"))
    return [(name, list(parts)) for name, parts in runs]


class _Pair(NamedTuple):
    """The matrices of a module: A [rank, in] and B [out, rank], float32."""

    name: str
    """of the module in the model that was adapted, which the config means"""
    a: torch.Tensor
    b: torch.Tensor


def _matrices(path: str, lora: LoraConfig, modules: Mapping[str, _Module], family: Family) -> dict[str, _Pair]:
    """The matrices of each module, by its name in a checkpoint."""
    file = _open(path)
    sides: dict[str, dict[str, str]] = {}
    adapted_names: dict[str, str] = {}
    for name in file:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{file.path!r}: tensor {name!r} is not supported: only lora_A and lora_B are")
        if family.has_text_config and is_for_images(match["module"]):
            continue  # PEFT adapts all modules of a name, such as q_proj, and these parts are not loaded
        module = _module_name(match["module"], modules, family)
        if module is None:
            raise ValueError(
                f"{file.path!r}: tensor {name!r} is not supported: an adapter can change only the projections of "
                "attention, of dense feed-forward layers and of shared experts"
            )
        if not lora.targets(match["module"]):
            raise ValueError(f"{file.path!r}: tensor {name!r} is of a module that target_modules does not name")
        adapted_names[module] = match["module"]
        of_module = sides.setdefault(module, {})
        if match["side"] in of_module:
            raise ValueError(f"{file.path!r}: {module} has two matrices {match['side']}")
        of_module[match["side"]] = name
    if not sides:
        raise ValueError(f"{file.path!r} has no matrices")
    expected = {name for name in modules if lora.is_exact and lora.targets(name)}
    if missing := sorted(expected - sides.keys()):
        raise ValueError(f"{file.path!r}: {missing[0]} has no matrices, but target_modules names it")
    pairs = {}
    for module, found in sides.items():
        if len(found) == 1:
            raise ValueError(f"{file.path!r}: {module} has no matrix {'B' if 'A' in found else 'A'}")
        adapted_name = adapted_names[module]
        _check_shapes(file, adapted_name, found, modules[module], lora)  # before a tensor takes memory
        pairs[module] = _Pair(adapted_name, _read(file, found["A"]), _read(file, found["B"]))
    return pairs


def _open(path: str) -> SafetensorsFile:
    file_path = os.path.join(path, _FILE)
    if not has_file(file_path):
        if has_file(os.path.join(path, _PICKLE)):
            raise ValueError(
                f"{path!r} has only {_PICKLE}, a pickle file, which may run code when loaded: save it as {_FILE}"
            )
        raise ValueError(f"{path!r} has no {_FILE}")
    try:
        return SafetensorsFile(file_path)
    except OSError as error:
        raise ValueError(f"{_FILE} in {path!r} cannot be read: {error.strerror or error}") from None


def _module_name(name: str, modules: Mapping[str, _Module], family: Family) -> str | None:
    """The name of a module in a checkpoint for text only. None: an adapter cannot change it."""
    parent, dot, last = in_language_model(name).rpartition(".")
    name = parent + dot + family.adapted_names.get(last, last)
    # An adapter of a model without an output head lacks "model.".
    return next((known for known in (name, f"model.{name}") if known in modules), None)


def _read(file: SafetensorsFile, name: str) -> torch.Tensor:
    """A copy in float32, which no other program can change."""
    if file.dtype(name) not in _TYPES:
        raise ValueError(f"{file.path!r}: tensor {name!r} must have floating-point numbers of 16 to 64 bits")
    tensor = file[name].to(torch.float32, copy=True)
    if not tensor.isfinite().all():
        raise ValueError(f"{file.path!r}: tensor {name!r} has numbers that are not finite in float32")
    return tensor


def _check_shapes(
    file: SafetensorsFile, adapted_name: str, tensors: Mapping[str, str], module: _Module, lora: LoraConfig
) -> None:
    """`tensors`: the names of A and B of a module."""
    rows, rank = sum(part.shape[0] for part in module.parts), lora.rank_of(adapted_name)
    for side, wanted in (("A", (rank, module.parameter.shape[1])), ("B", (rows, rank))):
        shape = file.shape(tensors[side])
        if shape != wanted:
            raise ValueError(
                f"{file.path!r}: matrix {side} of {adapted_name} has shape {shape}, but the model and the config "
                f"imply {wanted}"
            )


def _stacked(parameter: Parameter, pairs: Mapping[str, _Pair], lora: LoraConfig) -> LoraWeight:
    """The matrices of a parameter. A module without an adapter has zeros, and so has a rank that a module lacks."""
    modules, runs = dict(_modules(parameter)), _runs(parameter)
    rank = max(len(pair.a) for pair in pairs.values())
    a = torch.zeros(len(runs), rank, parameter.shape[1])
    b: list[torch.Tensor] = []
    for place, (name, parts) in enumerate(runs):
        rows = torch.zeros(sum(part.shape[0] for part in modules[name].parts), rank)
        if name in pairs:
            pair = pairs[name]
            a[place, : len(pair.a)] = pair.a
            rows[:, : len(pair.a)] = pair.b * lora.scale_of(pair.name)
        b += _in_order(rows, parts)
    return LoraWeight(a, torch.cat(b))


def _in_order(rows: torch.Tensor, parts: Iterable[Part]) -> Iterator[torch.Tensor]:
    """The rows of a module in the order of the model."""
    for part in parts:
        yield part.in_order(rows[part.within_tensor((slice(0, part.shape[0]),))])


def _fingerprint(weights: Mapping[str, LoraWeight]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensors in weights.items():
        for tensor in tensors:
            digest.update(f"\0{name} {tuple(tensor.shape)}\0".encode())
            digest.update(tensor.numpy().data)
    return digest.hexdigest()
