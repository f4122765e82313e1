"""MXFP4, the format of GPT-OSS's experts: groups of 32 numbers of 4 bits along a row, which share a power of two.

A number is e2m1: a sign, two bits of exponent, and one of mantissa. Twice such a number is an integer of 8 bits. So the
form "int8" of a QuantizedWeight has the same values, if float16 has the powers of two.
"""

from __future__ import annotations

import torch

from ..layers.quantized_weight import GROUP, QuantizedWeight

BLOCK_BYTES = GROUP // 2
"""Bytes of a group, without its scale"""
_DOUBLED = [sign * magnitude for sign in (1, -1) for magnitude in (0, 1, 2, 3, 4, 6, 8, 12)]
"""Twice the number that each code stands for"""
_PAIRS = torch.tensor([[_DOUBLED[byte & 15], _DOUBLED[byte >> 4]] for byte in range(256)], dtype=torch.int8)
"""[256, 2], of each byte. The lower bits stand for the first number."""
_SCALE_BIAS = 127
_FLOAT16_EXPONENTS = range(-24, 16)
"""Of the powers of two that float16 has"""


def widen(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix as float32 [n, k]. blocks: uint8 [n, k / GROUP, BLOCK_BYTES]. scales: uint8 [n, k / GROUP], e8m0."""
    powers = scales.view(torch.float8_e8m0fnu).float() / 2
    return (_doubled(blocks) * powers[..., None]).flatten(1)


def quantized_form(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """The matrix in the form "int8", with the same values if `fits_int8`."""
    return QuantizedWeight(_doubled(blocks).flatten(1), (scales.view(torch.float8_e8m0fnu).float() / 2).half(), None)


def fits_int8(blocks: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the form "int8" has the same values: float16 has half the power of two of each group that is not zero."""
    first, last = (exponent + 1 + _SCALE_BIAS for exponent in (_FLOAT16_EXPONENTS[0], _FLOAT16_EXPONENTS[-1]))
    others = (scales < first) | (scales > last)
    # The sign of a zero changes no sum.
    return not bool(others.any()) or not bool((blocks[others] & 0x77).any())


def _doubled(blocks: torch.Tensor) -> torch.Tensor:
    """Twice the numbers: int8 [n, k / GROUP, GROUP]."""
    pairs = _PAIRS.to(blocks.device).view(torch.int16).flatten()
    return pairs.index_select(0, blocks.flatten().int()).view(torch.int8).view(*blocks.shape[:-1], GROUP)
