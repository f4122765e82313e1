"""The Checkpoint of safetensors files with 8-bit matrices and their scales (srt/model_files/quantization_config.py)."""

from __future__ import annotations

import torch

from ...srt.model_files.quantization_config import Fp8Config
from ..kernels.fp8_layout import FP8_BLOCK
from ..layers.fp8_weight import Fp8Weight
from ..models.parameter import Region
from .safetensors_checkpoint import SafetensorsCheckpoint

_WEIGHT = ".weight"
_SCALES = ("_scale_inv", "_scale")
"""What follows the name of a matrix in the name of its scales. Both are factors, also the first."""


class Fp8Checkpoint:
    """A Checkpoint whose 8-bit matrices are read as they are, or widened to float32.

    Raises ValueError for an 8-bit tensor that has no scales or scales of an unknown shape, and for one that the config
    excludes.
    """

    def __init__(self, folder: str, config: Fp8Config) -> None:
        self._files = SafetensorsCheckpoint(folder, (torch.float8_e4m3fn,))
        self._by_block = config.by_block
        self._scales: dict[str, str] = {}
        """the name of the scales of each 8-bit matrix"""
        for name in sorted(self._files.names):
            if self._files.dtype(name) == torch.float8_e4m3fn:
                self._scales[name] = self._scales_of(name, config)
        self.names = self._files.names - set(self._scales.values())

    def dtype(self, name: str) -> torch.dtype | None:
        return None if name in self._scales else self._files.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def tensor(self, name: str, region: Region | None = None) -> torch.Tensor:
        if name not in self._scales:
            return self._files.tensor(name, region)
        return self._matrix(name, region).dequantize()

    def has_form(self, name: str, form: str) -> bool:
        return name in self._scales and form == ("fp8_block" if self._by_block else "fp8")

    def quantized(self, name: str, form: str, region: Region | None = None) -> Fp8Weight | None:
        return self._matrix(name, region) if self.has_form(name, form) else None

    def _scales_of(self, name: str, config: Fp8Config) -> str:
        shape = self.shape(name)
        if not name.endswith(_WEIGHT) or len(shape) != 2:
            raise ValueError(f"tensor {name!r} is float8_e4m3fn, but is not the weight of a linear layer")
        if config.excludes(name.removesuffix(_WEIGHT)):
            raise ValueError(f"tensor {name!r} is float8_e4m3fn, but quantization_config excludes it")
        found = [name + ending for ending in _SCALES if name + ending in self._files.names]
        if len(found) != 1:
            raise ValueError(f"tensor {name!r} is float8_e4m3fn and must have one tensor of scales, got {found}")
        n, k = shape
        given = self.shape(found[0])
        allowed = [(-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))] if config.by_block else [(n, 1), (n,), (1, 1), (1,), ()]
        if given not in allowed:
            raise ValueError(f"tensor {found[0]!r} has shape {given}, expected {' or '.join(map(str, allowed))}")
        return found[0]

    def _matrix(self, name: str, region: Region | None) -> Fp8Weight:
        shape = self.shape(name)
        rows, columns = region or (slice(0, shape[0]), slice(0, shape[1]))
        scales = self._files.tensor(self._scales[name]).float()
        if self._by_block:
            if columns.start % FP8_BLOCK:
                raise ValueError(
                    f"a rank's columns of {name!r} begin at {columns.start}, which is no multiple of {FP8_BLOCK}"
                )
            scales = scales[:, columns.start // FP8_BLOCK : -(-columns.stop // FP8_BLOCK)]
            scales = scales[torch.arange(rows.start, rows.stop) // FP8_BLOCK].t().contiguous()
        else:
            scales = scales.reshape(1, -1).expand(1, shape[0])[:, rows].contiguous()
        return Fp8Weight(self._files.tensor(name, (rows, columns)), scales)
