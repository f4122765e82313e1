"""All kernels but attention, in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest
from compiled_attention import fused_launches
from compiled_others import CALLS, CASES, assert_computes_as_meant, launches_of
from serving_shapes import SHAPES
from triton_aot import TARGETS, Resources, assert_fits, compile_each, compile_launch, on_targets

from tercet.model_executor.kernels.tuning import decode_tile


@pytest.mark.parametrize(("call", "arch"), on_targets(CALLS))
def test_compiles_and_fits(call: str, arch: str) -> None:
    launches = launches_of(call, arch)
    assert launches
    for launch in launches:
        assert_fits(compile_launch(launch, arch), arch)


def test_the_rotation_has_half_of_the_warps_of_decode_attention() -> None:
    """Then both add the squares of a head in the same order."""
    for call, head_dim in (("rotary-16x8x128-norm-store", 128), ("rotary-16x8x256-fp32-norm-store", 256)):
        for arch in TARGETS:
            (launch,) = launches_of(call, arch)
            warps = decode_tile(arch, head_dim, fp32=head_dim == 256).num_warps
            assert launch.kwargs["num_warps"] == warps // 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_rotation_adds_squares_in_one_order_wherever_it_stores(arch: str) -> None:
    """A thread adds up its own components first. Bytes of fp8 would give a thread twice as many."""
    calls = ["rotary-16x8x128-norm", "rotary-16x8x128-norm-store", "rotary-16x8x128-norm-fp8"]
    layouts = [compile_launch(launch, arch).layouts for call in calls for launch in launches_of(call, arch)]
    assert [_components_of_a_thread(layout) for layout in layouts] == [{8}] * 3


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_rotation_adds_squares_in_the_order_of_decode_attention(page_size: int) -> None:
    """Also where decode attention has more warps, for pages."""
    shape = next(shape for shape in SHAPES if str(shape) == "16x8x128-bfloat16")
    (fused,) = fused_launches(shape, "sm_90", norm=True, page_size=page_size)
    (apart,) = launches_of("rotary-16x8x128-norm-store")
    found = [_threads_of_a_head(compile_launch(launch, "sm_90").layouts) for launch in (fused, apart)]
    assert found == [{("8", "8", "1")}] * 2


def _threads_of_a_head(layouts: str) -> set[tuple[str, ...]]:
    """Where the squares of a head are added: its components in a thread, its threads in a warp, and its warps."""
    blocked = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*)\}>", layouts))
    summed = re.findall(r"\(tensor<\d+x\d+xf32, (#blocked\w*)>\) -> tensor<\d+xf32, #ttg.slice<\{dim = 1", layouts)
    assert summed
    return {tuple(re.findall(r"(?:Thread|Warp|CTA) = \[\d+, (\d+)\]", blocked[layout])) for layout in summed}


def _components_of_a_thread(layouts: str) -> set[int]:
    """How many neighbours along a head a thread has where the squares of a head are added."""
    blocked = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\]", layouts))
    summed = re.findall(r"\(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor<\d+xf32", layouts)
    assert summed
    return {int(blocked[layout]) for layout in summed}


@cache
def compiled() -> dict[str, list[Resources]]:
    """The kernels of all cases. They are disassembled at once, because the disassembler starts slowly."""
    return compile_each({case: launches() for case, launches in CASES.items()}, "sm_90")


@pytest.mark.parametrize("case", CASES)
def test_computes_as_meant(case: str) -> None:
    for resources in compiled()[case]:
        assert_computes_as_meant(resources)


def test_fused_products_of_edits_are_seen() -> None:
    edit = launches_of("sample-128256")[0]
    fused = compile_launch(replace(edit, kwargs=edit.kwargs | {"enable_fp_fusion": True}), "sm_90")
    with pytest.raises(AssertionError, match="torch rounds"):
        assert_computes_as_meant(fused)


def test_narrow_loads_are_seen() -> None:
    """A line of 49,153 logits begins at any multiple of 4 bytes."""
    weigh = compile_launch(launches_of("sample-49153")[1], "sm_90")
    with pytest.raises(AssertionError, match="less than 128 bits"):
        assert_computes_as_meant(weigh)


def test_products_and_sums_are_fused_whatever_tritons_default_is() -> None:
    """Triton 3.10 separates them unless it is told otherwise, and it reads this variable."""
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"


def test_what_each_triton_compiles_has_every_kernel() -> None:
    def kernels(calls: Iterable[str]) -> set[str]:
        return {launch.kernel.fn.__name__ for call in calls for launch in launches_of(call)}

    assert kernels(CASES) == kernels(CALLS)


def test_programs_share_the_vocabulary_of_a_line() -> None:
    """One program for each row would leave most of a GPU idle, and read 600 KB alone."""
    grids = {launch.kernel.fn.__name__: launch.grid for launch in launches_of("sample-128256")}
    for kernel in ("_edit_kernel", "_weigh_kernel", "_gather_kernel"):
        assert grids[kernel] == (64, -(-128256 // 4096))
