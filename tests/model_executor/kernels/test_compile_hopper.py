"""Extend attention for Hopper GPUs, compiled by the environment's own Triton."""

from __future__ import annotations

import re
from functools import cache

import pytest
from compiled_hopper import CASES, SHAPES, assert_overlaps
from some_cases import covering
from triton_aot import Resources, compile_each


def width_and_splits(case: str) -> tuple[int, str]:
    return SHAPES[case][2], case.rpartition(", ")[2]


FEW = covering(list(CASES), width_and_splits)


@cache
def compiled() -> dict[str, list[Resources]]:
    """The kernels of all cases. They are disassembled at once, because the disassembler starts slowly."""
    return compile_each({case: CASES[case]() for case in FEW}, "sm_90")


@pytest.mark.parametrize("case", FEW)
def test_products_overlap_and_tiles_are_copied_whole(case: str) -> None:
    resources, *merge = compiled()[case]
    assert len(merge) == case.endswith("as units")
    for each in (resources, *merge):
        assert_overlaps(each, case)
    registers = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", resources.assembly)
    assert {"240", "24"} <= set(registers), "consumers have the registers that the producer does not need"


def test_a_batch_has_a_program_for_each_multiprocessor() -> None:
    (launch,) = CASES["hopper-32x8x128, pages of 64, splits in turn"]()
    assert launch.grid == (132,)
