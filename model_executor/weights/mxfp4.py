"""MXFP4, the format of GPT-OSS's experts: groups of 32 numbers of 4 bits along a row, which share a power of two.

A number is e2m1: a sign, two bits of exponent, and one of mantissa. Twice such a number is an integer. So the forms
"e2m1" and "int8" of a QuantizedWeight have the same values, if float16 has the powers of two.
"""

from __future__ import annotations

import torch

from ..layers.quantized_weight import E2M1_VALUES, GROUP, QuantizedWeight

BLOCK_BYTES = GROUP // 2
"""Bytes of a group, without its scale"""
_CODES = torch.tensor([[byte & 15, byte >> 4] for byte in range(256)], dtype=torch.uint8)
"""[256, 2], the codes of each byte. The lower bits are those of the first number."""
_PAIRS = E2M1_VALUES[_CODES.int()]
"""[256, 2], twice the numbers of each byte"""
FORMS = ("e2m1", "int8")
"""The forms with the same values"""
_SCALE_BIAS = 127
_FLOAT16_EXPONENTS = range(-24, 16)
"""Of the powers of two that float16 has"""


def widen(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The matrix as float32 [n, k]. blocks: uint8 [n, k / GROUP, BLOCK_BYTES]. scales: uint8 [n, k / GROUP], e8m0."""
    powers = scales.view(torch.float8_e8m0fnu).float() / 2
    return (_of_each_byte(_PAIRS, blocks) * powers[..., None]).flatten(1)


def quantized_form(blocks: torch.Tensor, scales: torch.Tensor, form: str) -> QuantizedWeight:
    """The matrix in one of FORMS, with the same values if `has_forms`."""
    values = _of_each_byte(_CODES if form == "e2m1" else _PAIRS, blocks).flatten(1)
    return QuantizedWeight(values, float16_scales(scales.view(torch.float8_e8m0fnu).float() / 2), None)


def float16_scales(exact: torch.Tensor) -> torch.Tensor:
    """The scales as float16. One that is too large for it is finite, so that a group of zeros stays zero."""
    return exact.clamp(max=2.0 ** _FLOAT16_EXPONENTS[-1]).half()


def has_forms(blocks: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether FORMS have the same values: float16 has half the power of two of each group that is not zero."""
    first, last = (exponent + 1 + _SCALE_BIAS for exponent in (_FLOAT16_EXPONENTS[0], _FLOAT16_EXPONENTS[-1]))
    others = (scales < first) | (scales > last)
    # The sign of a zero changes no sum.
    return not bool(others.any()) or not bool((blocks[others] & 0x77).any())


def _of_each_byte(table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The table's values of each byte: [n, k / GROUP, GROUP]. table: 8 bits [256, 2]."""
    pairs = table.to(blocks.device).view(torch.int16).flatten()
    return pairs.index_select(0, blocks.flatten().int()).view(table.dtype).view(*blocks.shape[:-1], GROUP)
