"""The launches of linear layers with fp8 weights, for the shapes of serving, and checks of their machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from serving_shapes import meta
from triton_aot import Launch, Resources, recorded

from tercet.model_executor.kernels import fp8_linear as module

LAYERS = {
    "4096x4096": (4096, 4096, False),
    "28672x4096-blocks": (28672, 4096, True),
    "4096x14336-blocks": (4096, 14336, True),
    "960x576-bias": (960, 576, False),  # a row is no multiple of 128
}
"""Outputs, inputs, and whether each block has a scale. The wide tile is for the layers of 28672 outputs."""
HEIGHTS = {"low": 8, "high": 4096}
"""A number of rows for each tile."""


def fp8_launches(layer: str, rows: int, arch: str, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The rounding of the activations, and the product."""
    num_out, num_in, by_block = LAYERS[layer]
    weight = meta(num_out, num_in, dtype=torch.float8_e4m3fn)
    scales = meta(-(-num_in // 128) if by_block else 1, num_out, dtype=torch.float32)
    bias = meta(num_out, dtype=dtype) if "bias" in layer else None
    with patch.object(module, "arch_of", lambda device: arch), recorded() as launches:
        module.fp8_linear(meta(rows, num_in, dtype=dtype), weight, scales, bias)
    assert len(launches) == 2
    return launches


CASES: dict[str, Callable[[], list[Launch]]] = {
    f"linear-{layer}, {height}": partial(fp8_launches, layer, HEIGHTS[height], "sm_90")
    for layer, height in (("4096x4096", "low"), ("28672x4096-blocks", "low"), ("28672x4096-blocks", "high"))
}
"""What each Triton compiles for sm_90."""


def assert_multiplies_fp8(resources: Resources) -> None:
    """Checks that a product for sm_90 is of fp8, in batches of four instructions, on tiles that are copied ahead."""
    counts = resources.counts
    assert counts is not None
    if resources.kernel == "_fp8_linear_kernel":
        assert counts.wgmma == 4 * counts.wgmma_batches == 4 * counts.wgmma_waits > 0, resources
        assert counts.mma == 0 and counts.copies == counts.wide_copies > 0, resources
