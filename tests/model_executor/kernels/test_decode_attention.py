from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import Case, assert_close, build, cases, expected_decode, run_decode
from decoded_pairs import assert_pairs_are_decoded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.attention.registry import PAGE_OF_KV_TILES
from tercet.model_executor.kernels.primitives import KV_FP8_SOFT, reads_kv_in_pairs
from tercet.model_executor.kernels.tuning import LESS_SHARED_MEMORY, DecodeTile, decode_tile

TILES = [
    DecodeTile(split=16, block_n=16, num_warps=1, num_stages=1, programs=1),
    DecodeTile(split=32, block_n=16, num_warps=1, num_stages=1, programs=3),
    DecodeTile(split=64, block_n=32, num_warps=1, num_stages=1, programs=100),
]
PLAIN = Case(0, torch.float32, False, 1, 3, 64, 1, (70,), (1,), None, None, 0.125)


@settings(max_examples=examples(60))
@given(case=cases(), tile=st.sampled_from(TILES))
@example(case=PLAIN, tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(1,)), tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(400,)), tile=TILES[0])  # more splits than the merge takes at once
@example(case=dataclasses.replace(PLAIN, lens=(400, 3), extend_lens=(1, 1), has_sinks=True), tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(400, 3), extend_lens=(1, 1), window=20), tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, group=71, lens=(20,)), tile=TILES[1])  # two blocks of heads
def test_agrees_with_the_float64_twin(case: Case, tile: DecodeTile) -> None:
    problem = build(case)
    assert_close(run_decode(problem, tile), expected_decode(problem))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [2, 33, 66, 80, 96, 128, 255, 256])
def test_fp8_agrees_with_the_float64_twin(head_dim: int, dtype: torch.dtype) -> None:
    """An odd head dim is read byte by byte, and the others in pairs."""
    options = {"seed": head_dim, "dtype": dtype, "fp8": True, "num_kv_heads": 3, "head_dim": head_dim}
    problem = build(dataclasses.replace(PLAIN, **options, lens=(70, 1, 17), extend_lens=(1, 1, 1)))
    assert_close(run_decode(problem, TILES[1]), expected_decode(problem))


def test_all_pairs_of_bytes_are_decoded() -> None:
    assert_pairs_are_decoded(KV_FP8_SOFT.value, "cpu")


def test_which_kv_is_read_in_pairs() -> None:
    fp8 = torch.float8_e4m3fn
    assert reads_kv_in_pairs(fp8, 80, "sm_90") and reads_kv_in_pairs(fp8, 128, "sm_80")
    assert not reads_kv_in_pairs(fp8, 33, "sm_90") and not reads_kv_in_pairs(fp8, 128, "gfx942")
    assert not reads_kv_in_pairs(torch.bfloat16, 128, "sm_90")


@settings(max_examples=examples(15))
@given(case=cases(max_len=60, max_requests=4), tile=st.sampled_from(TILES), data=st.data())
def test_a_request_does_not_depend_on_the_batch(case: Case, tile: DecodeTile, data: st.DataObject) -> None:
    problem = build(case)
    everyone = run_decode(problem, tile)
    pick = data.draw(
        st.permutations(range(len(case.lens))).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n]))
    )
    assert torch.equal(run_decode(problem, tile, list(pick)), everyone[list(pick)])


@settings(max_examples=examples(40))
@given(case=cases(), tile=st.sampled_from(TILES), tiles_of_page=st.integers(1, 3))
@example(case=dataclasses.replace(PLAIN, lens=(90, 1, 37), extend_lens=(1, 1, 1)), tile=TILES[1], tiles_of_page=2)
@example(case=dataclasses.replace(PLAIN, lens=(90, 37), window=20), tile=TILES[2], tiles_of_page=1)
def test_one_look_up_for_a_tile_changes_no_bits(case: Case, tile: DecodeTile, tiles_of_page: int) -> None:
    """The same requests, with a look-up for each slot. No tile of fp8 KV is paged."""
    problem = build(dataclasses.replace(case, fp8=False, page_size=tiles_of_page * tile.block_n))
    paged = run_decode(problem, dataclasses.replace(tile, paged=True))
    assert paged.isfinite().all() and torch.equal(paged, run_decode(problem, tile))


@pytest.mark.parametrize(
    ("arch", "page_size", "options", "paged"),
    [
        ("sm_90", PAGE_OF_KV_TILES, {}, True),
        ("sm_90", 2 * PAGE_OF_KV_TILES, {}, True),
        ("sm_90", 1, {}, False),
        ("sm_90", 32, {}, False),
        ("sm_90", 96, {}, False),
        ("sm_90", PAGE_OF_KV_TILES, {"fp8": True}, False),
        ("sm_90", PAGE_OF_KV_TILES, {"fp32": True}, False),
        *((arch, PAGE_OF_KV_TILES, {}, False) for arch in ("sm_80", "gfx942", *LESS_SHARED_MEMORY)),
    ],
)
def test_a_tile_is_paged_where_pages_have_whole_tiles(
    arch: str, page_size: int, options: dict[str, bool], paged: bool
) -> None:
    for head_dim in (64, 80, 96, 128, 256):
        tile = decode_tile(arch, head_dim, page_size=page_size, **options)
        plain = decode_tile(arch, head_dim, **options)
        assert tile.paged is (paged and 64 < head_dim <= 128)
        assert not plain.paged and tile.split == plain.split and tile.split % tile.block_n == 0
        assert page_size % tile.block_n == 0 if tile.paged else tile == plain


def test_the_number_of_programs_does_not_matter() -> None:
    problem = build(dataclasses.replace(PLAIN, lens=(70, 1, 33), extend_lens=(1, 1, 1)))
    outs = [run_decode(problem, dataclasses.replace(TILES[1], programs=n)) for n in (1, 2, 5, 100)]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("sinks", [None, [0.5, -torch.inf, 1e4]])
def test_a_row_without_kv_gets_zeros(sinks: list[float] | None) -> None:
    problem = build(PLAIN)
    if sinks is not None:
        problem = dataclasses.replace(problem, sinks=torch.tensor(sinks))
    problem.seq_lens.zero_()
    assert torch.equal(run_decode(problem, TILES[0]), torch.zeros_like(problem.q_decode))


def test_a_sink_of_minus_infinity_is_none() -> None:
    without = build(dataclasses.replace(PLAIN, lens=(400, 17), extend_lens=(1, 1)))
    problem = dataclasses.replace(without, sinks=torch.full((3,), -torch.inf))
    assert torch.equal(run_decode(problem, TILES[0]), run_decode(without, TILES[0]))
