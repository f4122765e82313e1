"""Quantized weights for tests."""

from __future__ import annotations

import torch

from tercet.model_executor.layers.quantized_weight import GROUP, SUPER_BLOCK, QuantizedWeight

K_FORMS = ("q4_k", "q6_k", "mixed_k")
FORMS = ("int4", "int8", "e2m1", "mixed", *K_FORMS)
_VALUES = {"int4": (0, 16), "e2m1": (0, 16), "q4_k": (0, 16), "q6_k": (-32, 32), "mixed_k": (-32, 32)}
_SCALES_OF_A_GROUP = {"q6_k": 2, "mixed_k": 2, "mixed": 2}


def group_of(form: str) -> int:
    """What the length of a row is a multiple of."""
    return SUPER_BLOCK if form in K_FORMS else GROUP


def drawn_weight(form: str, n: int, groups: int, seed: int) -> QuantizedWeight:
    """A weight with all values, scales and minima that a file can have, some of them infinite, NaN or subnormal.

    groups: of `group_of(form)` weights
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def draw_halves(*shape: int) -> torch.Tensor:
        halves = torch.randn(shape, generator=generator).half()
        bits = draw(-(2**15), 2**15, *shape).to(torch.int16).view(torch.float16)
        return torch.where(torch.rand(shape, generator=generator) < 0.01, bits, halves)

    k = group_of(form) * groups
    num_scales = k // GROUP * _SCALES_OF_A_GROUP.get(form, 1)
    low, high = _VALUES.get(form, (-128, 128))
    values = draw(low, high, n, k).to(torch.uint8 if low == 0 else torch.int8)
    has_minima = form in ("int4", "q4_k", "mixed", "mixed_k")
    if form in K_FORMS:
        scales, minima = draw(-128, 128, 2, n, num_scales).to(torch.int8)
        factors = draw_halves(n, groups, 2 if has_minima else 1)
    else:
        scales, minima = draw_halves(2, n, num_scales)
        factors = None
    if form == "mixed":  # a float16 times 6 bits
        scales, minima = (x.float() * draw(0, 64, *x.shape) for x in (scales, minima))
    return QuantizedWeight(values, scales, minima if has_minima else None, factors)
