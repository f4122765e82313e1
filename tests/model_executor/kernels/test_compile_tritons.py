"""All kernels, compiled for sm_90 by every Triton that a supported torch brings.

`scripts/setup --tritons` installs them beside the environment's own. The compilers differ: asynchronous products that
one of them overlaps, another may serialise. So the machine code is read, not the assembly.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

import compiled_attention
import compiled_dependent
import compiled_experts
import compiled_fp8
import compiled_hopper
import compiled_latent
import compiled_lora
import compiled_others
import pytest
from compiled_attention import extend_launches, page_size_of, shape_of
from serving_shapes import DEFAULT
from triton_aot import (
    assert_fits,
    assert_one_look_up,
    assert_overlaps,
    assert_plan_holds,
    compile_launch,
    counted_together,
)
from tritons import CASES, WITH_OTHERS, compiled_with

pytestmark = pytest.mark.timeout(1500)  # the first test of a Triton compiles all of its cases


def with_tritons(cases: Collection[str]) -> list[tuple[str, str]]:
    """Cases with the Tritons that compile them."""
    return [(case, version) for case, version in WITH_OTHERS if case in cases]


def of(module: ModuleType) -> list[tuple[str, str]]:
    """Those of a module."""
    return with_tritons(module.CASES)


@pytest.mark.parametrize(("case", "version"), of(compiled_attention))
def test_products_and_copies_are_asynchronous(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        assert_overlaps(resources)
        assert_plan_holds(resources, shape_of(case), page_size_of(case))
        if page_size_of(case) > 1 and "merge" not in resources.kernel:
            assert_one_look_up(resources)


@pytest.mark.parametrize(("case", "version"), of(compiled_fp8))
def test_fp8_products_are_asynchronous(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_fp8.assert_multiplies_fp8(resources)


@pytest.mark.parametrize(("case", "version"), of(compiled_experts))
def test_products_of_grouped_rows_are_asynchronous(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_experts.assert_multiplies_grouped_rows(resources)


@pytest.mark.parametrize(("case", "version"), with_tritons(compiled_experts.FP8_CASES))
def test_products_with_fp8_experts_are_asynchronous(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_experts.assert_widens_fp8(resources)


@pytest.mark.parametrize(("case", "version"), of(compiled_others))
def test_the_other_kernels_compute_as_meant(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_others.assert_computes_as_meant(resources)


@pytest.mark.parametrize(("case", "version"), of(compiled_lora))
def test_adapters_are_copied_ahead(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_lora.assert_adds_adapters(resources)


@pytest.mark.parametrize(("case", "version"), of(compiled_hopper))
def test_attention_for_hopper_overlaps(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        compiled_hopper.assert_overlaps(resources, case)


@pytest.mark.parametrize(("case", "version"), of(compiled_latent))
def test_latent_attention_fits(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        compiled_latent.assert_is_latent(resources, "sm_90")


@pytest.mark.parametrize(("case", "version"), of(compiled_dependent))
def test_dependent_kernels_wait_before_they_read(case: str, version: str) -> None:
    for resources in compiled_with(version)[case]:
        assert_fits(resources, "sm_90")
        compiled_dependent.assert_waits_first(resources)


def test_kernels_have_the_same_counts_together_and_alone() -> None:
    launches = [*extend_launches(DEFAULT, "sm_90", "one split"), *CASES["dependent linear-2048x8192-gated"]()]
    compiled = [compile_launch(launch, "sm_90") for launch in launches]
    assert [each.counts for each in counted_together(compiled)] == [each.counts for each in compiled]
    assert compiled[0].counts != compiled[1].counts


def test_serialised_and_synchronous_products_are_seen() -> None:
    """With ARRIVE and DEPBAR around each product, as Triton 3.6 compiled a loop that may have no iteration. And without
    products of a warp group."""
    resources = compile_launch(extend_launches(DEFAULT, "sm_90", "one split")[0], "sm_90")
    assert_overlaps(resources)
    assert resources.counts is not None
    num = resources.counts.wgmma
    serialised = {"wgmma_batches": num, "wgmma_waits": num}
    synchronous = {"wgmma": 0, "wgmma_batches": 0, "wgmma_waits": 0, "mma": 4 * num}
    for changed in (serialised, synchronous):
        with pytest.raises(AssertionError):
            assert_overlaps(resources.with_counts(**changed))
