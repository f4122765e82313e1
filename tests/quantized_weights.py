"""Quantized weights for tests."""

from __future__ import annotations

import torch

from tercet.model_executor.layers.quantized_weight import GROUP, QuantizedWeight

FORMS = ("int4", "int8", "q4_k", "q6_k", "mixed_k")


def drawn_weight(form: str, n: int, groups: int, seed: int) -> QuantizedWeight:
    """A weight with all values, scales and minima that a file can have, some of them infinite, NaN or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    has_4_bits = form in ("int4", "q4_k")
    low, high, dtype = (0, 16, torch.uint8) if has_4_bits else (-128, 128, torch.int8)
    values = torch.randint(low, high, (n, GROUP * groups), generator=generator).to(dtype)
    scales, minima = torch.randn(2, n, groups * (2 if form in ("q6_k", "mixed_k") else 1), generator=generator).half()
    bits = torch.randint(-(2**15), 2**15, scales.shape, generator=generator, dtype=torch.int16)
    scales = torch.where(torch.rand(scales.shape, generator=generator) < 0.01, bits.view(torch.float16), scales)
    if form not in ("int4", "int8"):  # a float16 times 6 bits
        scales, minima = (x.float() * torch.randint(0, 64, x.shape, generator=generator) for x in (scales, minima))
    return QuantizedWeight(values, scales, minima if has_4_bits or form == "mixed_k" else None)
