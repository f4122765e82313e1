"""The largest tiles, compiled for a GPU whose blocks have 99 KB of shared memory: consumer GPUs, A10, L4, L40S."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from compiled_attention import decode_launches, extend_launches
from compiled_fp8 import HEIGHTS, LAYERS, fp8_launches
from compiled_others import launches_of
from serving_shapes import BY_NAME
from triton_aot import Launch, assert_fits, compile_launch

from tercet.model_executor.kernels.tuning import LESS_SHARED_MEMORY, decode_tile, extend_tile

pytestmark = pytest.mark.timeout(300)

ARCH = "sm_89"
CASES: dict[str, Callable[[], list[Launch]]] = {
    "extend of 192": lambda: extend_launches(BY_NAME["32x8x192-bfloat16"], ARCH, "splits in turn"),
    "extend of 256": lambda: extend_launches(BY_NAME["8x4x256-bfloat16-cap-window"], ARCH, "one split"),
    "extend of 128": lambda: extend_launches(BY_NAME["32x8x128-bfloat16"], ARCH, "one split"),
    "decode of 256": lambda: decode_launches(BY_NAME["8x4x256-bfloat16-cap-window"], ARCH, mixed=False),
    "decode of 128, float32": lambda: decode_launches(BY_NAME["32x8x128-float32"], ARCH, mixed=False),
    "small linear layer with a gate": lambda: launches_of("skinny-2048x8192-gated", ARCH),
    "fp8 linear layer": lambda: fp8_launches(max(LAYERS, key=lambda name: LAYERS[name][0]), HEIGHTS["high"], ARCH),
}


@pytest.mark.parametrize("case", CASES)
def test_the_largest_tiles_fit(case: str) -> None:
    for launch in CASES[case]():
        assert_fits(compile_launch(launch, ARCH), ARCH)


@pytest.mark.parametrize("arch", LESS_SHARED_MEMORY)
def test_all_such_gpus_have_these_tiles(arch: str) -> None:
    for width in (64, 128, 256):
        for fp32 in (False, True):
            assert decode_tile(arch, width, fp32=fp32) == decode_tile(ARCH, width, fp32=fp32)
            assert extend_tile(arch, width, fp32=fp32) == extend_tile(ARCH, width, fp32=fp32)
        assert extend_tile(arch, width, True) == extend_tile(ARCH, width, True)
