"""The Checkpoint of safetensors files that may have the matrices of all experts of a layer in one tensor (Qwen 3.5)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..models.parameter import Region
from .safetensors_checkpoint import STACKED_ENDINGS, SafetensorsCheckpoint


class _Place(NamedTuple):
    """Where the weight of an expert is."""

    tensor: str
    """[experts, rows, columns]"""
    expert: int
    rows: slice


class JoinedExperts:
    """A Checkpoint of experts. It names tensors as if each expert had its own, such as "....experts.3.up_proj.weight".

    A tensor `experts.gate_up_proj` has the rows of gate before those of up in each expert, as transformers has them in
    memory. A checkpoint may have tensors of each expert instead.

    Raises ValueError for a tensor of experts that has not three dimensions, or an odd number of such rows, and for a
    weight that is there twice.
    """

    def __init__(self, folder: str) -> None:
        self._files = SafetensorsCheckpoint(folder, stacked_experts=True)
        self._places: dict[str, _Place] = {}
        names = set(self._files.names)
        for name in sorted(names):
            if name.endswith(STACKED_ENDINGS):
                names.remove(name)
                self._add(name)
        if twice := sorted(names & self._places.keys()):
            raise ValueError(f"tensor {twice[0]!r} is also in {self._places[twice[0]].tensor!r}")
        self.names = frozenset(names | self._places.keys())

    def _add(self, name: str) -> None:
        shape, (module, _, last) = self._files.shape(name), name.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        if len(shape) != 3 or shape[1] % len(parts):
            raise ValueError(f"tensor {name!r} must have the dimensions experts, rows and columns, got {shape}")
        num_rows = shape[1] // len(parts)
        for place, part in enumerate(parts):
            rows = slice(place * num_rows, (place + 1) * num_rows)
            for expert in range(shape[0]):
                self._places[f"{module}.{expert}.{part}.weight"] = _Place(name, expert, rows)

    def dtype(self, name: str) -> torch.dtype:
        place = self._places.get(name)
        return self._files.dtype(name if place is None else place.tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self._files.shape(name)
        return place.rows.stop - place.rows.start, self._files.shape(place.tensor)[2]

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            return self._files.tensor(name, region)
        whole = self._files.tensor(place.tensor)[place.expert, place.rows]
        return whole if region is None else whole[region]

    def has_form(self, name: str, form: str) -> bool:
        return False

    def quantized(self, name: str, form: str, region: Region | None = None) -> None:
        """None: these files have no quantized form."""
