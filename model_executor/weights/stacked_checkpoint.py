"""The Checkpoint of safetensors files in which the matrices of all experts of a layer are one tensor (GPT-OSS)."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from ...srt.model_files.quantization_config import Mxfp4Config
from ..layers.quantized_weight import GROUP, QuantizedWeight
from ..models.parameter import Region
from . import mxfp4
from .safetensors_checkpoint import SafetensorsCheckpoint

_CPU = torch.device("cpu")
_NAME = re.compile(r"(?P<module>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<ending>|_bias|_blocks|_scales)")
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_DIMENSIONS = {"": 3, _BIAS: 2, _BLOCKS: 4, _SCALES: 3}
"""Of a tensor with each ending. The first is that of experts."""
_ROWS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(0, None, 1)},
}
"""The rows that each projection has in a tensor: those of gate and up take turns."""


class _Place(NamedTuple):
    """Where the weight or the bias of an expert's projection is."""

    tensor: str
    """the name of the tensor; for numbers of 4 bits, without its ending"""
    ending: str
    expert: int
    rows: slice


class StackedCheckpoint:
    """A Checkpoint of experts. It names tensors as if each expert had its own, such as "....experts.3.up_proj.weight".

    It reads matrices of 4 bits in the forms of mxfp4.py, or widened to float32.

    Raises ValueError for a tensor of experts with other dimensions or types than these formats have, and for a matrix
    of 4 bits that the config excludes.
    """

    def __init__(self, folder: str, config: Mxfp4Config | None, device: torch.device = _CPU) -> None:
        """`config`: None if all matrices are floating-point numbers. `device`: where matrices of 4 bits are widened."""
        self._device = device
        types = () if config is None else (torch.uint8,)
        self._files = SafetensorsCheckpoint(folder, types, stacked_experts=True)
        self._places: dict[str, _Place] = {}
        self._fits: dict[str, bool] = {}
        plain = set(self._files.names)
        for name in sorted(self._files.names):
            if match := _NAME.fullmatch(name):
                plain.remove(name)
                self._check(name, match, config)
                if match["ending"] != _SCALES:
                    self._add(name, match)
        self.names = frozenset(plain | self._places.keys())

    def dtype(self, name: str) -> torch.dtype | None:
        place = self._places.get(name)
        if place is None:
            return self._files.dtype(name)
        return None if place.ending == _BLOCKS else self._files.dtype(place.tensor + place.ending)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self._files.shape(name)
        stored = self._files.shape(place.tensor + place.ending)[1:]
        rows, *columns = (stored[1], stored[0]) if place.ending == "" else stored
        num_rows = len(range(*place.rows.indices(rows)))
        return (num_rows, columns[0] * GROUP) if place.ending == _BLOCKS else (num_rows, *columns)

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            return self._files.tensor(name, region).to(self._device)
        if place.ending == _BLOCKS:
            return self._widened(place, region or _all_of(self.shape(name)))
        whole = self._files.tensor(place.tensor + place.ending)[place.expert]
        of_place = (whole.t() if whole.dim() == 2 else whole)[place.rows]
        return (of_place if region is None else of_place[region]).to(self._device)

    def has_form(self, name: str, form: str) -> bool:
        place = self._places.get(name)
        if form not in mxfp4.FORMS or place is None or place.ending != _BLOCKS:
            return False
        if place.tensor not in self._fits:
            stored = (self._files.tensor(place.tensor + ending) for ending in (_BLOCKS, _SCALES))
            self._fits[place.tensor] = mxfp4.has_forms(*stored)
        return self._fits[place.tensor]

    def quantized(self, name: str, form: str, region: Region | None = None) -> QuantizedWeight | None:
        if not self.has_form(name, form):
            return None
        return mxfp4.quantized_form(*self._groups(self._places[name], region or _all_of(self.shape(name))), form)

    def _widened(self, place: _Place, region: Region) -> torch.Tensor:
        rows, columns = region
        first = columns.start // GROUP * GROUP
        whole_groups = slice(first, -(-columns.stop // GROUP) * GROUP)
        blocks, scales = (x.to(self._device) for x in self._groups(place, (rows, whole_groups)))
        return mxfp4.widen(blocks, scales)[:, columns.start - first : columns.stop - first]

    def _groups(self, place: _Place, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and scales of rows and columns. The columns are whole groups."""
        rows, columns = region
        assert columns.start % GROUP == columns.stop % GROUP == 0, columns
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        blocks, scales = (
            self._files.tensor(place.tensor + ending)[place.expert][place.rows][rows, groups].contiguous()
            for ending in (_BLOCKS, _SCALES)
        )
        return blocks, scales

    def _add(self, name: str, match: re.Match[str]) -> None:
        kind = "bias" if match["ending"] == _BIAS else "weight"
        stem = name.removesuffix(match["ending"])
        for expert in range(self._files.shape(name)[0]):
            for projection, rows in _ROWS[match["projection"]].items():
                of_expert = f"{match['module']}.{expert}.{projection}.{kind}"
                if of_expert in self._places:
                    raise ValueError(f"tensor {stem!r} is in the checkpoint twice: as it is, and with 4 bits")
                self._places[of_expert] = _Place(stem, match["ending"], expert, rows)

    def _check(self, name: str, match: re.Match[str], config: Mxfp4Config | None) -> None:
        shape, ending = self._files.shape(name), match["ending"]
        has_bytes, stem = self._files.dtype(name) == torch.uint8, name.removesuffix(ending)
        if len(shape) != _DIMENSIONS[ending] or has_bytes != (ending in (_BLOCKS, _SCALES)):
            kind = "bytes" if ending in (_BLOCKS, _SCALES) else "floating-point numbers"
            raise ValueError(
                f"tensor {name!r} must have {kind} and {_DIMENSIONS[ending]} dimensions, of which the first is that of "
                f"experts, got {self._files.dtype(name)} {shape}"
            )
        if ending == _SCALES and stem + _BLOCKS not in self._files.names:
            raise ValueError(f"tensor {name!r} has scales, but {stem + _BLOCKS!r} is missing")
        if ending != _BLOCKS:
            return
        assert config is not None  # else the files refuse bytes
        if config.excludes(match["module"]):
            raise ValueError(f"tensor {name!r} has numbers of 4 bits, but quantization_config excludes it")
        if stem + _SCALES not in self._files.names:
            raise ValueError(f"tensor {name!r} needs {stem + _SCALES!r}, which is missing")
        of_scales = self._files.shape(stem + _SCALES)
        if shape != (*of_scales, mxfp4.BLOCK_BYTES):
            raise ValueError(f"tensor {name!r} has shape {shape}, its scales imply {(*of_scales, mxfp4.BLOCK_BYTES)}")


def _all_of(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, length) for length in shape)
