"""Weights of 8 or 4 bits: how they are held, and how they are rounded.

Every 32 weights along a row share a scale, and a minimum where they have 4 bits, as in ggml's types Q8_0 and Q4_1. The
numbers that they are multiplied with are rounded to 8 bits on the way, in groups of 32 as well (csrc/cpu/quantized.h).
Scales for whole rows would cost several times the accuracy (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

GROUP = 32
"""weights along a row that share a scale"""
_CHUNK_ROWS = 4096
"""rows that are rounded at once: intermediate tensors take several times their memory"""


class QuantizedWeight(NamedTuple):
    """A matrix [n, k]: values * scales + minima, group by group; k is a multiple of GROUP."""

    values: torch.Tensor
    """[n, k]; int8: above -128; int4: uint8, below 16"""
    scales: torch.Tensor
    """float16 [n, k / GROUP]"""
    minima: torch.Tensor | None
    """the same; None: int8"""

    @property
    def bits(self) -> int:
        return 8 if self.minima is None else 4

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> torch.Tensor:
        """float32 [n, k]"""
        groups = self.values.unflatten(1, (-1, GROUP)) * self.scales.float()[..., None]
        if self.minima is not None:
            groups += self.minima.float()[..., None]
        return groups.flatten(1)

    def with_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """`change` moves, adds or removes rows of the tensor that it is given."""
        minima = None if self.minima is None else change(self.minima)
        return QuantizedWeight(change(self.values), change(self.scales), minima)


def quantize(weight: torch.Tensor, form: str) -> QuantizedWeight:
    """weight: [n, k], any floating dtype. Multiples of the scale that are nearest to it; the scale is such that the
    largest magnitude of a group, for int4 its extremes, can be had."""
    return stacked(_quantize(rows.float().unflatten(1, (-1, GROUP)), form) for rows in weight.split(_CHUNK_ROWS))


def stacked(weights: Iterable[QuantizedWeight]) -> QuantizedWeight:
    """Rows of all, of one form, one after the other."""
    values, scales, minima = zip(*weights, strict=True)
    return QuantizedWeight(torch.cat(values), torch.cat(scales), None if minima[0] is None else torch.cat(minima))


def _quantize(groups: torch.Tensor, form: str) -> QuantizedWeight:
    """groups: float32 [n, k / GROUP, GROUP]"""
    if form == "int8":
        scales = _float16_scales(groups.abs().amax(2) / 127)
        return QuantizedWeight(_steps(groups, scales).clamp_(-127, 127).to(torch.int8).flatten(1), scales, None)
    minima = groups.amin(2).half()
    scales = _float16_scales((groups.amax(2) - minima) / 15)
    steps = _steps(groups - minima[..., None], scales).clamp_(0, 15)
    return QuantizedWeight(steps.to(torch.uint8).flatten(1), scales, minima)


def _float16_scales(exact: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest float16, or to the next larger one where the nearest is much too small: no multiple of it
    would be near the largest weight of the group. That happens below 2**-14 only, where float16 has a fixed step."""
    nearest = exact.half()
    is_too_small = nearest.float() < exact * (1 - 2**-11)
    return (nearest.view(torch.int16) + is_too_small).view(torch.float16)


def _steps(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scales = scales.float()[..., None]
    return torch.where(scales > 0, groups / scales, 0).round_()
