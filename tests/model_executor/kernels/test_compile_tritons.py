"""Attention and fp8 products, compiled for sm_90 by every Triton that a supported torch brings.

`scripts/setup --tritons` installs them beside the environment's own. The compilers differ: asynchronous products that
one of them overlaps, another may serialise. So the machine code is read, not the assembly.
"""

from __future__ import annotations

import compiled_fp8
import pytest
import triton
from compiled_attention import CASES, TRITONS, compiled_with, folder_of, shape_of
from triton_aot import Resources, assert_fits, assert_overlaps, assert_plan_holds

pytestmark = pytest.mark.timeout(1500)  # the first test of a Triton compiles every case

OTHERS = [version for version in TRITONS if version != triton.__version__]
"""The environment's own Triton compiles in test_compile_decode.py and test_compile_extend.py."""


def compiled(version: str, case: str) -> list[Resources]:
    if not (folder_of(version) / "triton").is_dir():
        pytest.skip(f"Triton {version} is not installed: scripts/setup --tritons")
    return compiled_with(version)[case]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_products_and_copies_are_asynchronous(version: str, case: str) -> None:
    for resources in compiled(version, case):
        assert_fits(resources, "sm_90")
        assert_overlaps(resources)
        assert_plan_holds(resources, shape_of(case))


@pytest.mark.parametrize("case", compiled_fp8.CASES)
@pytest.mark.parametrize("version", OTHERS)
def test_fp8_products_are_asynchronous(version: str, case: str) -> None:
    for resources in compiled(version, case):
        assert_fits(resources, "sm_90")
        compiled_fp8.assert_multiplies_fp8(resources)
