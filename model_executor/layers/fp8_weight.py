"""Weights of 8-bit floating point (float8_e4m3fn): their scales and their rounding.

A weight stands for its value times a scale in float32. A row has one scale, or one for each FP8_BLOCK weights.
Checkpoints with scales of whole matrices or of blocks of 128 x 128 are brought to this form: each row gets its own
copy. So rows can be stacked and divided among ranks as those of any matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from ..kernels.fp8_layout import FP8_BLOCK, FP8_MAX

FP8_FORMS = frozenset({"fp8", "fp8_block"})
"""The forms of a parameter: one scale for a row, or one for each FP8_BLOCK weights of a row."""
_CHUNK_ROWS = 4096
"""Rows that are rounded at once. The intermediate tensors take several times the memory of these rows."""


class Fp8Weight(NamedTuple):
    """A matrix [n, k] of values * scales."""

    values: torch.Tensor
    """float8_e4m3fn [n, k]"""
    scales: torch.Tensor
    """float32 [1, n] or [ceil(k / FP8_BLOCK), n]"""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device))

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Fp8Weight:
        """Apply `change` to the rows of both tensors. It may move, add or remove rows."""
        # torch cannot select rows of its 8-bit floats
        values = change(self.values.view(torch.uint8)).view(self.values.dtype)
        return Fp8Weight(values, change(self.scales.t()).t().contiguous())

    def clone(self) -> Fp8Weight:
        return Fp8Weight(self.values.clone(), self.scales.clone())

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32 [n, k]."""
        k = self.shape[1]
        scales = self.scales if len(self.scales) == 1 else self.scales.repeat_interleave(FP8_BLOCK, 0)[:k]
        return self.values.float() * scales.t()


def fp8_bytes(shape: tuple[int, ...], form: str) -> int:
    """The size of a matrix in bytes, with its scales."""
    num_rows, num_columns = shape
    num_scales = 1 if form == "fp8" else -(-num_columns // FP8_BLOCK)
    return num_rows * (num_columns + 4 * num_scales)


def quantize_fp8(weight: torch.Tensor, form: str) -> Fp8Weight:
    """Round a weight [n, k] of any floating dtype to `form`: to the nearest number of e4m3fn times the scale.

    With "fp8" the largest magnitude of a row becomes FP8_MAX; with "fp8_block" that of 128 x 128 weights, as in the
    checkpoints with such scales.
    """
    return stack_fp8(_quantize(rows.float(), form) for rows in weight.split(_CHUNK_ROWS))


def _quantize(rows: torch.Tensor, form: str) -> Fp8Weight:
    if form == "fp8":
        most = rows.abs().amax(1)[None]
    else:
        columns = torch.stack([part.abs().amax(1) for part in rows.split(FP8_BLOCK, 1)])
        blocks = torch.stack([part.amax(1) for part in columns.split(FP8_BLOCK, 1)], 1)
        most = blocks.repeat_interleave(FP8_BLOCK, 1)[:, : len(rows)]
    scales = most / FP8_MAX
    scales = torch.where(scales > 0, scales, 1)  # of zeros, and of numbers too small for a scale
    wide = Fp8Weight(torch.ones_like(rows), scales).dequantize()
    return Fp8Weight((rows / wide).to(torch.float8_e4m3fn), scales)


def stack_fp8(weights: Iterable[Fp8Weight]) -> Fp8Weight:
    """Concatenate the rows of several weights of the same form."""
    values, scales = zip(*weights, strict=True)
    return Fp8Weight(_cat(values), torch.cat(scales, 1))


def _cat(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """torch.cat of float8, as bytes: torch copies those on every device."""
    return torch.cat([tensor.view(torch.uint8) for tensor in values]).view(torch.float8_e4m3fn)
