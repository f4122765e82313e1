"""Decode attention in one kernel: the bits of the kernels that it replaces, the twin, and programs in any order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import TOLERANCE, Case, assert_close
from fused_cases import make_step, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import examples, permuted_programs

from tercet.model_executor.kernels.fused_decode import can_fuse_decode, fused_decode_ref
from tercet.model_executor.kernels.tuning import DecodeTile

PLAIN = Case(0, torch.float32, False, 1, 3, 64, 1, (70,), (1,), None, None, 0.125)
LARGEST_ERROR = Case(642990, torch.bfloat16, False, 2, 1, 128, 4, (49,), (1,), None, None, 0.125)
TILES = [
    DecodeTile(split=16, block_n=16, num_warps=1, num_stages=1, programs=1),
    DecodeTile(split=32, block_n=16, num_warps=1, num_stages=1, programs=3),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # The interpreter takes milliseconds for each split, so at most one request has more than three.
    others = st.lists(st.integers(1, 33), max_size=draw(st.sampled_from([0, 1, 3])))
    lens = tuple(draw(st.permutations([draw(st.integers(1, 70)), *draw(others)])))
    return Case(
        seed=draw(st.integers(0, 2**31)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        fp8=draw(st.booleans()),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 7, 16])),
        head_dim=draw(st.sampled_from([64, 128, 16, 80])),
        page_size=draw(st.sampled_from([1, 4])),
        lens=lens,
        extend_lens=(1,) * len(lens),
        window=draw(st.sampled_from([None, 1, 7, 33])),
        soft_cap=draw(st.sampled_from([None, 5.0])),
        sm_scale=0.125,
        has_sinks=draw(st.booleans()),
    )


@settings(max_examples=examples(8))
@given(case=cases(), tile=st.sampled_from(TILES), norm=st.booleans(), order=st.integers(0, 2**31))
@example(case=dataclasses.replace(PLAIN, lens=(300, 1), extend_lens=(1, 1)), tile=TILES[0], norm=True, order=0)
@example(case=dataclasses.replace(PLAIN, lens=(300, 17), window=40), tile=TILES[0], norm=False, order=1)
@example(case=dataclasses.replace(PLAIN, lens=(90, 3), has_sinks=True), tile=TILES[0], norm=False, order=2)
def test_has_the_bits_of_the_kernels_it_replaces(case: Case, tile: DecodeTile, norm: bool, order: int) -> None:
    step = make_step(case, tile, norm=norm)
    with permuted_programs(order):
        fused = step.fused(list(range(len(case.lens))))
    for mine, wanted in zip(fused, step.apart(), strict=True):
        assert same_bits(mine, wanted)
    pick = list(range(len(case.lens)))[::-2]
    assert same_bits(step.fused(pick)[0], fused[0][pick])


@settings(max_examples=examples(8))
@given(case=cases(), tile=st.sampled_from(TILES), norm=st.booleans(), tiles_of_page=st.integers(1, 3))
@example(case=dataclasses.replace(PLAIN, lens=(300, 17), window=101), tile=TILES[1], norm=True, tiles_of_page=1)
def test_one_look_up_for_a_tile_changes_no_bits(case: Case, tile: DecodeTile, norm: bool, tiles_of_page: int) -> None:
    """The same requests, with a look-up for each slot. The new token's K and V may be alone in their tile."""
    case = dataclasses.replace(case, fp8=False, page_size=tiles_of_page * tile.block_n)
    everyone = list(range(len(case.lens)))
    paged = make_step(case, dataclasses.replace(tile, paged=True), norm=norm)
    fused, plain = paged.fused(everyone), make_step(case, tile, norm=norm).fused(everyone)
    assert fused[0].isfinite().all() and all(map(same_bits, fused, plain))
    assert all(map(same_bits, fused, paged.apart()))


@settings(max_examples=examples(4))
@given(case=cases(), norm=st.booleans())
@example(case=LARGEST_ERROR, norm=False)
def test_agrees_with_the_float64_twin(case: Case, norm: bool) -> None:
    step = make_step(dataclasses.replace(case, fp8=False), TILES[0], norm=norm)
    p, pools = step.problem, step.pools(torch.float64)
    everyone = list(range(len(p.rows)))
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in step.norm.items()}
    wanted = fused_decode_ref(
        step.qkv.double(), case.num_heads, step.cos.double(), step.sin.double(), *pools, step.slots(everyone),
        p.req_to_token, p.rows, p.seq_lens, **wide, **p.options,
    )  # fmt: skip
    # Triton's interpreter cuts bfloat16 where a GPU rounds. Unlike `decode_attention`, this kernel also converts the
    # rotated queries and keys: an error of 1.1e-2 if they are cut, of 1.9e-3 if they are rounded.
    tolerance = TOLERANCE[case.dtype] * (2 if case.dtype == torch.bfloat16 else 1)
    assert_close(step.fused(everyone)[0], wanted, tolerance=tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "fits"),
    [
        (32, 8, 128, torch.bfloat16, True),
        (16, 1, 256, torch.bfloat16, True),
        (17, 1, 64, torch.bfloat16, False),
        (8, 8, 128, torch.float32, True),
        (8, 8, 256, torch.float32, False),
    ],
)
def test_the_heads_that_it_serves(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, fits: bool) -> None:
    assert can_fuse_decode(heads, kv_heads, head_dim, dtype) is fits
