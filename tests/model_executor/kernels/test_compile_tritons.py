"""All kernels, compiled for sm_90 by every Triton that a supported torch brings.

`scripts/setup --tritons` installs them beside the environment's own. The compilers differ: asynchronous products that
one of them overlaps, another may serialise. So the machine code is read, not the assembly.
"""

from __future__ import annotations

import dataclasses

import compiled_attention
import compiled_dependent
import compiled_experts
import compiled_fp8
import compiled_hopper
import compiled_lora
import compiled_others
import pytest
import triton
from compiled_attention import extend_launches, page_size_of, shape_of
from serving_shapes import SHAPES
from triton_aot import assert_fits, assert_one_look_up, assert_overlaps, assert_plan_holds, compile_launch
from tritons import TRITONS, compiled_with

pytestmark = pytest.mark.timeout(1500)  # the first test of a Triton compiles every case

OTHERS = [version for version in TRITONS if version != triton.__version__]
"""The environment's own Triton compiles in the other test_compile_*.py."""


@pytest.mark.parametrize("case", compiled_attention.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_products_and_copies_are_asynchronous(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        assert_overlaps(resources)
        assert_plan_holds(resources, shape_of(case), page_size_of(case))
        if page_size_of(case) > 1 and "merge" not in resources.kernel:
            assert_one_look_up(resources)


@pytest.mark.parametrize("case", compiled_fp8.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_fp8_products_are_asynchronous(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_fp8.assert_multiplies_fp8(resources)


@pytest.mark.parametrize("case", compiled_experts.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_products_of_grouped_rows_are_asynchronous(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_experts.assert_multiplies_grouped_rows(resources)


@pytest.mark.parametrize("case", compiled_others.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_the_other_kernels_compute_as_meant(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_others.assert_computes_as_meant(resources)


@pytest.mark.parametrize("case", compiled_lora.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_adapters_are_copied_ahead(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_lora.assert_adds_adapters(resources)


@pytest.mark.parametrize("case", compiled_hopper.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_attention_for_hopper_overlaps(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        compiled_hopper.assert_overlaps(resources, case)


@pytest.mark.parametrize("case", compiled_dependent.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_dependent_kernels_wait_before_they_read(version: str, case: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_dependent.assert_waits_first(resources)


def test_serialised_and_synchronous_products_are_seen() -> None:
    """With ARRIVE and DEPBAR around each product, as Triton 3.6 compiled a loop that may have no iteration. And without
    products of a warp group."""
    resources = compile_launch(extend_launches(SHAPES[2], "sm_90", "one split")[0], "sm_90")
    assert_overlaps(resources)
    assert resources.counts is not None
    num = resources.counts.wgmma
    serialised = dataclasses.replace(resources.counts, wgmma_batches=num, wgmma_waits=num)
    synchronous = dataclasses.replace(resources.counts, wgmma=0, wgmma_batches=0, wgmma_waits=0, mma=4 * num)
    for counts in (serialised, synchronous):
        with pytest.raises(AssertionError):
            assert_overlaps(dataclasses.replace(resources, counts=counts))
