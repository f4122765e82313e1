"""Rotary position embedding (arXiv 2104.09864) in the half-split layout: component i turns with component i + dim/2."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...srt.model_files.rope_config import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeConfig, YarnScaling

_BLOCK = 2048
"""positions of a table that are computed at once"""


class CosSin(NamedTuple):
    """One step's rotation, float32. `RotaryEmbedding` makes it [T, 1, head_dim] each: both halves of cos are the same,
    those of sin differ in sign (-, +), so that rotating is x * cos + swapped_halves(x) * sin."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding:
    """Angles are computed per step rather than looked up: a handful of operations that all layers share."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self.attention_factor = rope_frequencies(rope, head_dim)
        self.frequencies = frequencies.to(device)
        """float32 [head_dim / 2], radians per position"""

    def cover(self, num_positions: int) -> None:
        """There is no table that would have to reach so far."""

    def __call__(self, positions: torch.Tensor) -> CosSin:
        """positions: int64 [T]"""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


class RotationTable:
    """Cosines and sines of the positions below `len(table)`, computed in blocks as far as `cover` was told.

    A whole table at once would take several times its memory for a moment.
    """

    def __init__(self, rope: RopeConfig, table: torch.Tensor) -> None:
        """table: float32 [context_len, head_dim], to be filled: cosines, then sines of head_dim / 2 angles"""
        frequencies, self._factor = rope_frequencies(rope, table.shape[1])
        self._frequencies = frequencies.to(table.device)
        self.table = table
        self._num_covered = 0

    def cover(self, num_positions: int) -> None:
        """Fills the table at least up to that many positions."""
        while self._num_covered < num_positions:
            block = self.table[self._num_covered : self._num_covered + _BLOCK]
            positions = torch.arange(
                self._num_covered, self._num_covered + len(block), dtype=torch.float32, device=block.device
            )
            angles = positions[:, None] * self._frequencies
            cos, sin = block.chunk(2, dim=1)
            torch.mul(angles.cos(), self._factor, out=cos)
            torch.mul(angles.sin_(), self._factor, out=sin)
            self._num_covered += len(block)


def rotate(x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """x [T, heads, head_dim] rotated, computed in float32 and returned in x's dtype."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos_sin.cos, swapped.to(torch.float32), cos_sin.sin).to(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 [head_dim / 2] on the CPU, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case FrequencyDivisors(divisors):
            return frequencies / torch.tensor(divisors), 1.0
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, rope.theta, head_dim), rope.scaling.attention_factor


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    # How many times a component turns in the original context: few turns -> scaled, many -> kept.
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
