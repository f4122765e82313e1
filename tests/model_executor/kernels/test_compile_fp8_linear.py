"""Linear layers with fp8 weights, compiled for GPUs that need not be here."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from compiled_fp8 import HEIGHTS, LAYERS, assert_multiplies_fp8, fp8_launches
from triton_aot import Resources, assert_fits, compile_each, compile_launch

_ARITHMETIC = re.compile(r"\b((?:wgmma\.mma_async|mma|fma|mul|add)\.\S*f(?:32|16)\S*)")


@cache
def products() -> dict[tuple[str, str], list[Resources]]:
    """The products for sm_90. They are disassembled at once, because the disassembler starts slowly."""
    layers = product(LAYERS, HEIGHTS)
    return compile_each(
        {(layer, height): fp8_launches(layer, HEIGHTS[height], "sm_90")[1:] for layer, height in layers}, "sm_90"
    )


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_hopper_multiplies_fp8_in_batches(layer: str, height: str) -> None:
    (made,) = products()[layer, height]
    assert_fits(made, "sm_90")
    assert_multiplies_fp8(made)
    width = 128 if layer.startswith("28672") else 64
    found = set(re.findall(r"wgmma\.mma_async\S+", made.assembly))
    assert found == {f"wgmma.mma_async.sync.aligned.m64n{width}k32.f32.e4m3.e4m3"}


@pytest.mark.parametrize("layer", LAYERS)
def test_both_tiles_compute_an_output_with_the_same_instructions(layer: str) -> None:
    """A thread of either tile has as many outputs. So equal counts of each operation mean equal sums for a row."""
    low, high = (Counter(_ARITHMETIC.findall(products()[layer, height][0].assembly)) for height in HEIGHTS)
    assert low == high and any("fma" in name or "mul" in name for name in low)


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_devices_without_fp8_products_compile_and_fit(arch: str, height: str) -> None:
    made = compile_launch(fp8_launches("28672x4096-blocks", HEIGHTS[height], arch)[1], arch)
    assert_fits(made, arch)
    assert "e4m3" not in made.assembly


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_rounding_of_activations_compiles_and_fits(arch: str, dtype: torch.dtype) -> None:
    assert_fits(compile_launch(fp8_launches("960x576-bias", 8, arch, dtype)[0], arch), arch)
