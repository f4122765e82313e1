"""Extend attention in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

import re

import pytest
import torch
from compiled_attention import SPLITS, extend_launches
from serving_shapes import SHAPES, Shape
from some_cases import crossed
from triton_aot import TARGETS, assert_fits, assert_one_look_up, assert_overlaps, compile_launch, on_targets

from tercet.model_executor.kernels.tuning import ExtendTile, extend_tile

MATRIX_INSTRUCTION = {"sm_80": "mma.sync.aligned.m16n8k16", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma_f32_"}
"""What the products of 16-bit operands have to be made of."""


LONG = [
    shape
    for shape in SHAPES
    if shape.dtype == torch.bfloat16
    and ((shape.head_dim in (64, 128) and shape.num_heads == 32) or shape.num_heads == 40)
]
IN_PAGES = [
    shape for shape in SHAPES if extend_tile("sm_90", shape.head_dim, shape.fp8, fp32=shape.fp32, page_size=64).paged
]


def check(arch: str, shape: Shape, splits: str, page_size: int = 1) -> None:
    launch, *merge = extend_launches(shape, arch, splits, page_size=page_size)
    resources = compile_launch(launch, arch)
    for other in merge:
        assert_fits(compile_launch(other, arch), arch)
    assert_fits(resources, arch)
    if not shape.fp32:
        assert MATRIX_INSTRUCTION[arch] in resources.assembly or (shape.fp8 and shape.head_dim == 256)
        if arch == "sm_90":
            assert_overlaps(resources)
    if page_size > 1:
        assert_one_look_up(resources)


@pytest.mark.parametrize(("shape", "arch"), on_targets(SHAPES), ids=str)
def test_extend(shape: Shape, arch: str) -> None:
    check(arch, shape, "one split")


# The splits that are units take the code of one split, and merge in a kernel of their own.
@pytest.mark.parametrize(("shape", "arch"), on_targets(LONG), ids=str)
def test_extend_of_long_requests(shape: Shape, arch: str) -> None:
    check(arch, shape, "splits in turn")


def test_extend_of_long_requests_with_a_soft_cap_and_no_window() -> None:
    """The largest heads leave few registers for the cap."""
    (gemma,) = (shape for shape in SHAPES if shape.soft_cap and not shape.window)
    check("sm_90", gemma, "splits in turn")


@pytest.mark.parametrize(("shape", "splits"), crossed(IN_PAGES, SPLITS[:2], each=1), ids=str)
def test_extend_in_pages(shape: Shape, splits: str) -> None:
    check("sm_90", shape, splits, page_size=64)


@pytest.mark.parametrize("shape", SHAPES[2:3], ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_extend_of_few_tokens_after_long_prefixes(arch: str, shape: Shape) -> None:
    check(arch, shape, "splits as units")


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("shape", [*LONG, Shape(64, 9, 3, dtype=torch.float32)], ids=str)
def test_all_warps_load_a_merged_row_before_one_stores_it(shape: Shape, page_size: int) -> None:
    """Maxima and sums are stored as single words, nothing else is. A barrier lies between a load and such a store."""
    launch, *_ = extend_launches(shape, "sm_90", "splits in turn", page_size=page_size)
    kinds = re.findall(r"bar\.sync|ld\.global|st\.global\.b32", compile_launch(launch, "sm_90").assembly)
    order = "".join({"bar.sync": "b", "ld.global": "l", "st.global.b32": "s"}[kind] for kind in kinds)
    assert "ls" not in order and order.count("s") >= 4


def test_a_spill_is_seen() -> None:
    """Four warps cannot hold a tile of this size."""
    tile = ExtendTile(block_m=128, block_n=128, num_warps=4, num_stages=3)
    (launch,) = extend_launches(SHAPES[2], "sm_90", "one split", tile)
    with pytest.raises(AssertionError, match="spilled"):
        assert_fits(compile_launch(launch, "sm_90"), "sm_90")
