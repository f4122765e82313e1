"""Quantized weights of 4 to 8 bits: their forms, and rounding to two of them.

"int8" and "int4" are the forms that weights can be rounded to. Each group of 32 weights along a row has a scale, and
with 4 bits also a minimum, as in ggml's types Q8_0 and Q4_1. With --quantization, their matrix product also rounds
activations to 8 bits in groups of 32 (csrc/cpu/quantized.h). One scale per row would make the error several times
larger (docs/log.md).

A file may give other forms. "e2m1" has the numbers of MXFP4, which are not equally far apart: a table has them. "q4_k"
and "q6_k" have weights of 4 and 6 bits, with scales of 8 bits and a factor for each super-block of 256 weights, as
ggml's Q4_K and Q6_K. "mixed_k" has the values of all K types of ggml, with 6 bits, and "mixed" those of all types that
ggml_types.py converts, with 8 bits. These two also serve matrices whose parts have different types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

GROUP = 32
"""Weights along a row that share a scale. In some forms, each half of them has a scale of its own."""
SUPER_BLOCK = 256
"""Weights along a row that share the factors of their scales, in the K forms."""
E2M1_VALUES = torch.tensor([sign * x for sign in (1, -1) for x in (0, 1, 2, 3, 4, 6, 8, 12)], dtype=torch.int8)
"""Twice the number that each code of e2m1 stands for"""
_E2M1_MIDDLES = (E2M1_VALUES[:7] + E2M1_VALUES[1:8]) / 2
"""The middle between each magnitude and the next one"""
_CHUNK_ROWS = 4096
"""Rows that are rounded at once. The intermediate tensors take several times the memory of these rows."""


class QuantizedWeight(NamedTuple):
    """A matrix [n, k] whose groups are values * scale + minimum.

    k is a multiple of GROUP, in the K forms of SUPER_BLOCK.
    """

    values: torch.Tensor
    """[n, k]; 8 bits: int8; 6 bits: int8, in [-32, 32); 4 bits: uint8, below 16; e2m1: codes of this type"""
    scales: torch.Tensor
    """[n, k / GROUP] in int4, int8, e2m1 (all float16) and q4_k (int8); [n, 2 * k / GROUP], for half groups, in q6_k,
    mixed_k (both int8) and mixed (float32)"""
    minima: torch.Tensor | None
    """as the scales; None: the form has none"""
    factors: torch.Tensor | None = None
    """K forms: float16 [n, k / SUPER_BLOCK, 1 or 2], for the scales and for the minima; None in the others"""

    @property
    def bits(self) -> int:
        if self.values.dtype == torch.uint8:
            return 4
        return 8 if self.factors is None else 6

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32 [n, k]."""
        scales, minima = self.float_scales()
        values = E2M1_VALUES[self.values.int()] if self.bits == 4 and minima is None else self.values
        groups = values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
        if minima is not None:
            groups += minima[..., None]
        return groups.flatten(1)

    def float_scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales and minima as float32."""
        if self.factors is None:
            return self.scales.float(), None if self.minima is None else self.minima.float()
        factors = self.factors.float().repeat_interleave(self.scales.shape[1] // self.factors.shape[1], 1)
        return self.scales * factors[..., 0], None if self.minima is None else self.minima * factors[..., 1]

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """Apply `change` to the rows of all tensors. It may move, add or remove rows."""
        return self._with(change)

    def with_columns(self, columns: slice) -> QuantizedWeight:
        """Take these columns, which are whole groups, in the K forms whole super-blocks."""

        def part(x: torch.Tensor) -> torch.Tensor:
            width = self.values.shape[1] // x.shape[1]
            assert columns.start % width == columns.stop % width == 0, (columns, width)
            return x[:, columns.start // width : columns.stop // width]

        return self._with(part)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        minima = None if self.minima is None else change(self.minima)
        factors = None if self.factors is None else change(self.factors)
        return QuantizedWeight(change(self.values), change(self.scales), minima, factors)


def quantize(weight: torch.Tensor, form: str) -> QuantizedWeight:
    """Round a weight [n, k] of any floating dtype to `form`, "int8", "int4" or "e2m1".

    Each value becomes the nearest step of its group's scale. With int8 the steps reach the largest magnitude of the
    group, with int4 its minimum and maximum. Only two kinds of weights are rounded to e2m1: random ones, and those of
    MXFP4 in a GGUF file whose scales float16 does not have.
    """
    return stacked(_quantize(rows.float().unflatten(1, (-1, GROUP)), form) for rows in weight.split(_CHUNK_ROWS))


def stacked(weights: Iterable[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the rows of several weights of the same form."""
    parts = list(weights)
    values, scales, minima, factors = ([x for x in tensors if x is not None] for tensors in zip(*parts, strict=True))
    return QuantizedWeight(
        torch.cat(values),
        torch.cat(scales),
        torch.cat(minima) if minima else None,
        torch.cat(factors) if factors else None,
    )


def _quantize(groups: torch.Tensor, form: str) -> QuantizedWeight:
    """Round groups: float32 [n, k / GROUP, GROUP]."""
    if form == "int8":
        scales = _float16_scales(groups.abs().amax(2) / 127)
        return QuantizedWeight(_steps(groups, scales).clamp_(-127, 127).to(torch.int8).flatten(1), scales, None)
    if form == "e2m1":
        scales = (groups.abs().amax(2) / E2M1_VALUES.max()).log2().ceil().clamp(-24, 15).exp2()
        magnitudes = torch.bucketize(groups.abs() / scales[..., None], _E2M1_MIDDLES, out_int32=True)
        return QuantizedWeight((magnitudes + 8 * (groups < 0)).to(torch.uint8).flatten(1), scales.half(), None)
    minima = groups.amin(2).half()
    scales = _float16_scales((groups.amax(2) - minima) / 15)
    steps = _steps(groups - minima[..., None], scales).clamp_(0, 15)
    return QuantizedWeight(steps.to(torch.uint8).flatten(1), scales, minima)


def _float16_scales(exact: torch.Tensor) -> torch.Tensor:
    """Round scales to float16: to the nearest, or to the next larger if the nearest is much too small.

    A scale that is too small cannot reach the largest weight of its group. This happens only below 2**-14, where
    float16 has a fixed step.
    """
    nearest = exact.half()
    is_too_small = nearest.float() < exact * (1 - 2**-11)
    return (nearest.view(torch.int16) + is_too_small).view(torch.float16)


def _steps(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scales = scales.float()[..., None]
    return torch.where(scales > 0, groups / scales, 0).round_()
