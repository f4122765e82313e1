"""Rotary position embedding (arXiv 2104.09864) in the half-split layout: component i rotates with i + head_dim / 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...srt.model_files.rope_config import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScale,
    RopeConfig,
    YarnScaling,
)

_BLOCK = 2048
"""Positions of a table that are computed at once."""


class CosSin(NamedTuple):
    """Cosines and sines of a step's tokens, float32.

    From `RotaryEmbedding` both are [T, 1, head_dim]. The halves of cos are equal and those of sin have opposite signs
    (-, +), so a rotation is x * cos + swapped_halves(x) * sin.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    q_scales: torch.Tensor | None = None
    """[T], what the queries of a token are multiplied by; None: by nothing"""


class OneRotary(Protocol):
    """One rotary embedding: positions int64 [T] -> its rotation."""

    def cover(self, num_positions: int) -> None: ...

    def __call__(self, positions: torch.Tensor, /) -> Any: ...


class Rotaries:
    """The rotary embeddings of a model whose layers may differ in it: positions int64 [T] -> the rotation of each."""

    def __init__(self, each: Sequence[OneRotary]) -> None:
        self.each = each

    def cover(self, num_positions: int) -> None:
        for one in self.each:
            one.cover(num_positions)

    def __call__(self, positions: torch.Tensor) -> list[Any]:
        return [one(positions) for one in self.each]


class RotaryEmbedding:
    """Rotary embedding without a table: each step computes its angles once, for all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.frequencies, self.factors = (x.to(device) for x in rope_frequencies(rope, head_dim))
        """float32 [head_dim / 2]: radians per position, and what cos and sin are multiplied by"""
        self._query_scale = rope.query_scale

    def cover(self, num_positions: int) -> None:
        """Does nothing: there is no table."""

    def __call__(self, positions: torch.Tensor) -> CosSin:
        """positions: int64 [T]"""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.factors, angles.sin() * self.factors
        q_scales = query_scales(self._query_scale, positions)
        return CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), q_scales)


class RotationTable:
    """A table of cosines and sines of the positions below `len(table)`. `cover` fills it in blocks.

    Filling the whole table at once would take several times its memory for intermediate tensors.
    """

    def __init__(self, rope: RopeConfig, table: torch.Tensor) -> None:
        """table: float32 [context_len, head_dim], which `cover` fills. A row has its cosines first, then its sines."""
        self._frequencies, self._factors = (x.to(table.device) for x in rope_frequencies(rope, table.shape[1]))
        self.table = table
        self._num_covered = 0

    def cover(self, num_positions: int) -> None:
        """Fill the table for at least `num_positions` positions."""
        while self._num_covered < num_positions:
            block = self.table[self._num_covered : self._num_covered + _BLOCK]
            positions = torch.arange(
                self._num_covered, self._num_covered + len(block), dtype=torch.float32, device=block.device
            )
            angles = positions[:, None] * self._frequencies
            cos, sin = block.chunk(2, dim=1)
            torch.mul(angles.cos(), self._factors, out=cos)
            torch.mul(angles.sin_(), self._factors, out=sin)
            self._num_covered += len(block)


def rotate(x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotate x: [T, heads, head_dim] in float32. Returns x's dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos_sin.cos, swapped.to(torch.float32), cos_sin.sin).to(x.dtype)


def query_scales(scale: QueryScale | None, positions: torch.Tensor) -> torch.Tensor | None:
    """What the queries of positions are multiplied by: int64 [T] -> float32 [T], or None if they are not scaled."""
    if scale is None:
        return None
    return (positions // scale.period).float().log1p_().mul_(scale.beta).add_(1)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The frequencies in radians per position, and the factors of cos and sin, float32 [head_dim / 2] on the CPU each.

    Components that are not rotated have a frequency of zero and a factor of 1. `rope`: made by `for_context`.
    `head_dim`: at least that of `rope`.
    """
    of_head = rope.head_dim or head_dim
    rotary_dim = of_head if rope.rotary_dim is None else rope.rotary_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    frequencies, factor = _scaled(1.0 / (rope.theta**exponents), rope, rotary_dim)
    unrotated = (head_dim - rotary_dim) // 2
    factors = torch.full_like(frequencies, factor)
    return torch.cat((frequencies, torch.zeros(unrotated))), torch.cat((factors, torch.ones(unrotated)))


def _scaled(frequencies: torch.Tensor, rope: RopeConfig, rotary_dim: int) -> tuple[torch.Tensor, float]:
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case ProportionalScaling(rotated, factor):
            return torch.where(torch.arange(len(frequencies)) < rotated, frequencies / factor, 0), 1.0
        case FrequencyDivisors(divisors, factor):
            return frequencies / torch.tensor(divisors), factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, rope.theta, rotary_dim), rope.scaling.attention_factor
        case LongRopeScaling():
            raise AssertionError("the context length is not known: for_context was not called")


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    # Rotations of each component in the original context. Components with few are scaled, those with many are kept.
    turns = scaling.original_context_len / (2 * math.pi / frequencies)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> torch.Tensor:
    def component_that_turns(times: float) -> float:
        return head_dim * math.log(scaling.original_context_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = component_that_turns(scaling.beta_fast), component_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, as in the paper's code
    scaled = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * scaled + frequencies * (1 - scaled)
