"""Quantized weights of 8 or 4 bits: their format and their rounding.

Each group of 32 weights along a row has a scale, and 4-bit groups also a minimum, as in ggml's types Q8_0 and Q4_1.
These are the forms "int8" and "int4". Their matrix product rounds activations to 8 bits, also in groups of 32
(csrc/cpu/quantized.h). One scale per row would make the error several times larger (docs/log.md).

Files may also have the forms "q4_k" and "q6_k", with scales and minima in float32, as in Q4_K and Q6_K. The form
"mixed_k" holds all of ggml's types that ggml_types.py converts, so parts of a matrix may have different types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

GROUP = 32
"""Weights along a row that share a scale."""
_CHUNK_ROWS = 4096
"""Rows that are rounded at once. The intermediate tensors take several times the memory of these rows."""


class QuantizedWeight(NamedTuple):
    """A matrix [n, k] whose groups are values * scale + minimum. k is a multiple of GROUP."""

    values: torch.Tensor
    """[n, k]; 8 bits: int8, above -128; 4 bits: uint8, below 16"""
    scales: torch.Tensor
    """float16 [n, k / GROUP]; q4_k: float32; q6_k and mixed_k: float32 [n, 2 * k / GROUP], for half groups"""
    minima: torch.Tensor | None
    """as the scales; None: the form has none"""

    @property
    def bits(self) -> int:
        return 4 if self.values.dtype == torch.uint8 else 8

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """The matrix as float32 [n, k]."""
        groups = self.values.unflatten(1, (self.scales.shape[1], -1)) * self.scales.float()[..., None]
        if self.minima is not None:
            groups += self.minima.float()[..., None]
        return groups.flatten(1)

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """Apply `change` to the rows of all tensors. It may move, add or remove rows."""
        minima = None if self.minima is None else change(self.minima)
        return QuantizedWeight(change(self.values), change(self.scales), minima)

    def with_columns(self, columns: slice) -> QuantizedWeight:
        """Take these columns, which are whole groups."""

        def part(x: torch.Tensor) -> torch.Tensor:
            width = self.values.shape[1] // x.shape[1]
            return x[:, columns.start // width : columns.stop // width]

        minima = None if self.minima is None else part(self.minima)
        return QuantizedWeight(part(self.values), part(self.scales), minima)


def quantize(weight: torch.Tensor, form: str) -> QuantizedWeight:
    """Round a weight [n, k] of any floating dtype to `form`, "int8" or "int4".

    Each value becomes the nearest step of its group's scale. With int8 the steps reach the largest magnitude of the
    group, with int4 its minimum and maximum.
    """
    return stacked(_quantize(rows.float().unflatten(1, (-1, GROUP)), form) for rows in weight.split(_CHUNK_ROWS))


def stacked(weights: Iterable[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the rows of several weights of the same form."""
    values, scales, minima = zip(*weights, strict=True)
    return QuantizedWeight(torch.cat(values), torch.cat(scales), None if minima[0] is None else torch.cat(minima))


def _quantize(groups: torch.Tensor, form: str) -> QuantizedWeight:
    """Round groups: float32 [n, k / GROUP, GROUP]."""
    if form == "int8":
        scales = _float16_scales(groups.abs().amax(2) / 127)
        return QuantizedWeight(_steps(groups, scales).clamp_(-127, 127).to(torch.int8).flatten(1), scales, None)
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
