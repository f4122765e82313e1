"""Extend attention in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from functools import cache

import pytest
import torch
from compiled_attention import SPLITS, extend_launches
from serving_shapes import BY_NAME, DEFAULT, SHAPES, Shape
from some_cases import covering
from triton_aot import (
    TARGETS,
    Resources,
    assert_fits,
    assert_one_look_up,
    assert_overlaps,
    compile_each,
    compile_launch,
)

from tercet.model_executor.kernels.tuning import ExtendTile, extend_tile

pytestmark = pytest.mark.timeout(900)  # the first test of a GPU compiles all of its cases

MATRIX_INSTRUCTION = {"sm_80": "mma.sync.aligned.m16n8k16", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma_f32_"}
"""What the products of 16-bit operands have to be made of."""


Case = tuple[Shape, str, int, str]
"""A shape, one of SPLITS, the page size and the GPU."""


def tile_of(shape: Shape, page_size: int, arch: str) -> ExtendTile:
    return extend_tile(arch, shape.head_dim, shape.fp8, fp32=shape.fp32, page_size=page_size)


def every_case() -> Iterator[Case]:
    one, in_turn, as_units = SPLITS
    for shape in SHAPES:
        is_long = (shape.head_dim in (64, 128) and shape.num_heads == 32) or shape.num_heads == 40
        kinds = [one, in_turn] if is_long and shape.dtype == torch.bfloat16 else [one]
        # The splits that are units take the code of one split, and merge in a kernel of their own.
        kinds += [as_units] if shape == DEFAULT else []
        yield from ((shape, splits, 1, arch) for splits in kinds for arch in TARGETS)
        if tile_of(shape, 64, "sm_90").paged:
            yield from ((shape, splits, 64, "sm_90") for splits in (one, in_turn))
    # The largest heads leave few registers for a cap, and a thread of fp32 has other words of a merged row.
    for name in ("8x4x256-bfloat16-cap", "9x3x64-float32"):
        yield BY_NAME[name], in_turn, 1, "sm_90"


def aspects(case: Case) -> Iterable[Hashable]:
    shape, splits, page_size, arch = case
    yield arch, splits, page_size
    if arch == "sm_90":
        yield tile_of(shape, page_size, arch)
        yield "kind", shape.kind, page_size
        yield "width", shape.head_dim
        yield "options", shape.soft_cap, shape.window, shape.has_sinks
        if shape == DEFAULT or (splits != SPLITS[0] and (shape.fp32 or shape.soft_cap)):
            yield case


CASES = covering(list(every_case()), aspects)


def chosen(splits: str) -> list[Case]:
    return [case for case in CASES if case[1] == splits]


@cache
def compiled(arch: str) -> dict[Case, list[Resources]]:
    """The kernels of all cases for a GPU. They are disassembled at once, because the disassembler starts slowly."""
    cases = [case for case in CASES if case[3] == arch]
    return compile_each({case: extend_launches(case[0], arch, case[1], page_size=case[2]) for case in cases}, arch)


def check(shape: Shape, splits: str, page_size: int, arch: str) -> None:
    found = compiled(arch)[shape, splits, page_size, arch]
    for resources in found:
        assert_fits(resources, arch)
    resources, *_ = found
    if not shape.fp32:
        assert MATRIX_INSTRUCTION[arch] in resources.assembly or (shape.fp8 and shape.head_dim == 256)
        if arch == "sm_90":
            assert_overlaps(resources)
    if page_size > 1:
        assert_one_look_up(resources)


@pytest.mark.parametrize(("shape", "splits", "page_size", "arch"), chosen("one split"), ids=str)
def test_extend(shape: Shape, splits: str, page_size: int, arch: str) -> None:
    check(shape, splits, page_size, arch)


@pytest.mark.parametrize(("shape", "splits", "page_size", "arch"), chosen("splits as units"), ids=str)
def test_extend_of_few_tokens_after_long_prefixes(shape: Shape, splits: str, page_size: int, arch: str) -> None:
    check(shape, splits, page_size, arch)


@pytest.mark.parametrize(("shape", "splits", "page_size", "arch"), chosen("splits in turn"), ids=str)
def test_extend_of_long_requests(shape: Shape, splits: str, page_size: int, arch: str) -> None:
    check(shape, splits, page_size, arch)


@pytest.mark.parametrize(
    ("shape", "page_size"), [(case[0], case[2]) for case in chosen("splits in turn") if case[3] == "sm_90"], ids=str
)
def test_all_warps_load_a_merged_row_before_one_stores_it(shape: Shape, page_size: int) -> None:
    """Maxima and sums are stored as single words, nothing else is. A barrier lies between a load and such a store."""
    launch, *_ = extend_launches(shape, "sm_90", "splits in turn", page_size=page_size)
    kinds = re.findall(r"bar\.sync|ld\.global|st\.global\.b32", compile_launch(launch, "sm_90").assembly)
    order = "".join({"bar.sync": "b", "ld.global": "l", "st.global.b32": "s"}[kind] for kind in kinds)
    assert "ls" not in order and order.count("s") >= 4


def test_a_spill_is_seen() -> None:
    """Four warps cannot hold a tile of this size."""
    tile = ExtendTile(block_m=128, block_n=128, num_warps=4, num_stages=3)
    (launch,) = extend_launches(DEFAULT, "sm_90", "one split", tile)
    with pytest.raises(AssertionError, match="spilled"):
        assert_fits(compile_launch(launch, "sm_90"), "sm_90")
