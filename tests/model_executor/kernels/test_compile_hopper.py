"""Extend attention for Hopper GPUs, compiled by the environment's own Triton."""

from __future__ import annotations

import re

import pytest
from compiled_hopper import CASES, SHAPES, assert_overlaps
from some_cases import covering
from triton_aot import compile_launch


def width_and_splits(case: str) -> tuple[int, str]:
    return SHAPES[case][2], case.rpartition(", ")[2]


@pytest.mark.parametrize("case", covering(list(CASES), width_and_splits))
def test_products_overlap_and_tiles_are_copied_whole(case: str) -> None:
    launch, *merge = CASES[case]()
    assert len(merge) == case.endswith("as units")
    for other in merge:
        assert_overlaps(compile_launch(other, "sm_90"), case)
    resources = compile_launch(launch, "sm_90")
    assert_overlaps(resources, case)
    registers = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", resources.assembly)
    assert {"240", "24"} <= set(registers), "consumers have the registers that the producer does not need"


def test_a_batch_has_a_program_for_each_multiprocessor() -> None:
    (launch,) = CASES["hopper-32x8x128, pages of 64, splits in turn"]()
    assert launch.grid == (132,)
