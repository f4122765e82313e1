from __future__ import annotations

import dataclasses

import pytest
import torch
from attention_cases import assert_close
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from latent_cases import (
    LatentCase,
    LatentProblem,
    build_latent,
    expected_latent,
    latent_cases,
    run_latent_decode,
    run_latent_extend,
)
from triton_interpreter import dots_by_rows, examples

from tercet.model_executor.attention.registry import PAGE_OF_KV_TILES
from tercet.model_executor.kernels.tuning import (
    INTERPRETER,
    LESS_SHARED_MEMORY,
    DecodeTile,
    ExtendTile,
    latent_decode_tile,
    latent_extend_tile,
)

DECODE_TILES = [
    DecodeTile(split=16, block_n=16, num_warps=1, num_stages=1, programs=1),
    DecodeTile(split=32, block_n=16, num_warps=1, num_stages=1, programs=3, max_heads=16),
    DecodeTile(split=64, block_n=32, num_warps=1, num_stages=1, programs=100),
]
EXTEND_TILES = [ExtendTile(16, 16, 1, 1, 32), ExtendTile(32, 16, 1, 1, 16), ExtendTile(64, 32, 1, 1, 64)]
PLAIN = LatentCase(0, torch.float32, 3, 32, 16, 1, (70,), (20,))
IN_PAGES = dataclasses.replace(PLAIN, lens=(90, 37), extend_lens=(30, 3), page_size=32)


def decode(p: LatentProblem, tile: DecodeTile, pick: list[int] | None = None) -> torch.Tensor:
    """With one look-up for a KV tile where pages have whole ones."""
    return run_latent_decode(p, dataclasses.replace(tile, paged=p.case.page_size % tile.block_n == 0), pick)


def attend(p: LatentProblem, tile: ExtendTile, *arguments: torch.Tensor, by_unit: bool = False) -> torch.Tensor:
    paged = p.case.page_size % tile.block_n == 0
    return run_latent_extend(
        p, dataclasses.replace(tile, paged=paged), DECODE_TILES[1], *arguments, by_unit=by_unit
    )  # fmt: skip


def extend(p: LatentProblem, tile: ExtendTile, *, by_unit: bool = False) -> torch.Tensor:
    return attend(p, tile, p.q_extend, p.rows, p.extend_lens, p.seq_lens - p.extend_lens, by_unit=by_unit)


@settings(max_examples=examples(20))
@given(case=latent_cases(), tile=st.sampled_from(DECODE_TILES))
@example(case=dataclasses.replace(PLAIN, lens=(1,), extend_lens=(1,)), tile=DECODE_TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(300, 3), extend_lens=(1, 1)), tile=DECODE_TILES[0])
@example(case=dataclasses.replace(IN_PAGES, num_heads=40, extend_lens=(1, 1)), tile=DECODE_TILES[1])
@example(case=LatentCase(1, torch.bfloat16, 16, 512, 64, 16, (40,), (1,)), tile=DECODE_TILES[1])
def test_decode_agrees_with_the_float64_twin(case: LatentCase, tile: DecodeTile) -> None:
    problem = build_latent(case)
    assert_close(decode(problem, tile), expected_latent(problem, decode=True))


@settings(max_examples=examples(15))
@given(case=latent_cases(max_len=60), tile=st.sampled_from(EXTEND_TILES), by_unit=st.booleans())
@example(case=PLAIN, tile=EXTEND_TILES[0], by_unit=False)
@example(case=dataclasses.replace(PLAIN, lens=(2,), extend_lens=(2,)), tile=EXTEND_TILES[0], by_unit=False)
@example(case=dataclasses.replace(PLAIN, lens=(40, 33, 9), extend_lens=(40, 1, 5)), tile=EXTEND_TILES[1], by_unit=True)
@example(case=IN_PAGES, tile=EXTEND_TILES[0], by_unit=False)
@example(case=LatentCase(1, torch.bfloat16, 16, 512, 64, 16, (40,), (3,)), tile=EXTEND_TILES[1], by_unit=False)
def test_extend_agrees_with_the_float64_twin(case: LatentCase, tile: ExtendTile, by_unit: bool) -> None:
    problem = build_latent(case)
    assert_close(extend(problem, tile, by_unit=by_unit), expected_latent(problem, decode=False))


@settings(max_examples=examples(15))
@given(case=latent_cases(max_len=60, max_requests=4), tile=st.sampled_from(DECODE_TILES), data=st.data())
def test_a_decoding_request_does_not_depend_on_the_batch(
    case: LatentCase, tile: DecodeTile, data: st.DataObject
) -> None:
    problem = build_latent(case)
    everyone = decode(problem, tile)
    order = data.draw(st.permutations(range(len(case.lens))))
    pick = list(order[: data.draw(st.integers(1, len(order)))])
    assert torch.equal(decode(problem, tile, pick), everyone[pick])


@settings(max_examples=examples(15))
@given(case=latent_cases(max_len=50, max_requests=4), tile=st.sampled_from(EXTEND_TILES), data=st.data())
def test_an_extending_request_does_not_depend_on_the_batch(
    case: LatentCase, tile: ExtendTile, data: st.DataObject
) -> None:
    problem = build_latent(case)
    everyone = extend(problem, tile).split(case.extend_lens)
    queries = problem.q_extend.split(case.extend_lens)
    order = data.draw(st.permutations(range(len(case.lens))))
    pick = list(order[: data.draw(st.integers(1, len(order)))])
    out = attend(
        problem, tile, torch.cat([queries[i] for i in pick]), problem.rows[pick], problem.extend_lens[pick],
        (problem.seq_lens - problem.extend_lens)[pick],
    )  # fmt: skip
    assert torch.equal(out, torch.cat([everyone[i] for i in pick]))


@settings(max_examples=examples(15))
@given(case=latent_cases(max_len=60, max_requests=1), tile=st.sampled_from(EXTEND_TILES), cut=st.integers(2, 58))
def test_a_token_does_not_depend_on_the_chunk(case: LatentCase, tile: ExtendTile, cut: int) -> None:
    length = case.lens[0]
    assume(2 <= cut <= length - 2)  # a chunk of one token is the decode kernel's
    problem = build_latent(dataclasses.replace(case, extend_lens=(length,), num_heads=min(case.num_heads, 3)))
    chunks = torch.tensor([cut]), torch.tensor([length - cut])
    with dots_by_rows():
        whole = extend(problem, tile)
        first = attend(problem, tile, problem.q_extend[:cut], problem.rows, chunks[0], torch.tensor([0]))
        rest = attend(
            problem, tile, problem.q_extend[cut:], problem.rows, chunks[1], chunks[0], by_unit=bool(cut % 2)
        )  # fmt: skip
    assert torch.equal(torch.cat([first, rest]), whole)


@settings(max_examples=examples(15))
@given(case=latent_cases(max_len=90, max_requests=2, max_query_rows=80), tile=st.sampled_from(EXTEND_TILES))
@example(case=dataclasses.replace(PLAIN, lens=(150,), extend_lens=(5,)), tile=EXTEND_TILES[1])
def test_splits_as_units_have_the_bits_of_splits_in_turn(case: LatentCase, tile: ExtendTile) -> None:
    problem = build_latent(case)
    assert torch.equal(extend(problem, tile, by_unit=True), extend(problem, tile))


def test_the_splits_are_merged_and_not_one_softmax() -> None:
    """The results of two lengths of splits differ in their last bits, or the tests above would compare nothing."""
    problem = build_latent(dataclasses.replace(PLAIN, lens=(150,), extend_lens=(20,)))
    tile = EXTEND_TILES[0]
    assert not torch.equal(extend(problem, tile), extend(problem, dataclasses.replace(tile, split=2048)))
    longer = dataclasses.replace(DECODE_TILES[0], split=256)
    assert not torch.equal(decode(problem, DECODE_TILES[0]), decode(problem, longer))


@settings(max_examples=examples(15))
@given(case=latent_cases(), tiles_of_page=st.integers(1, 3), index=st.integers(0, 2))
def test_one_look_up_for_a_tile_changes_no_bits(case: LatentCase, tiles_of_page: int, index: int) -> None:
    """The same requests, with a look-up for each slot."""
    own, new = DECODE_TILES[index], EXTEND_TILES[index]
    problem = build_latent(dataclasses.replace(case, page_size=tiles_of_page * max(own.block_n, new.block_n)))
    assert torch.equal(decode(problem, own), run_latent_decode(problem, own))
    arguments = problem.q_extend, problem.rows, problem.extend_lens, problem.seq_lens - problem.extend_lens
    assert torch.equal(attend(problem, new, *arguments), run_latent_extend(problem, new, DECODE_TILES[1], *arguments))


def test_neither_the_programs_nor_the_blocks_of_heads_matter() -> None:
    problem = build_latent(dataclasses.replace(PLAIN, num_heads=40, lens=(70, 1, 33), extend_lens=(1, 1, 1)))
    tile = DECODE_TILES[1]
    outs = [run_latent_decode(problem, dataclasses.replace(tile, programs=n), room=n) for n in (1, 2, 100)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    with dots_by_rows():
        blocks = [run_latent_decode(problem, dataclasses.replace(tile, max_heads=n)) for n in (16, 32, 64)]
    assert all(torch.equal(out, blocks[0]) for out in blocks)


def test_a_row_without_kv_gets_zeros() -> None:
    problem = build_latent(PLAIN)
    problem.seq_lens.zero_()
    assert torch.equal(decode(problem, DECODE_TILES[0]), torch.zeros(1, 3, 32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", INTERPRETER, *LESS_SHARED_MEMORY])
def test_a_tile_is_paged_where_pages_have_whole_tiles(arch: str) -> None:
    for page_size in (1, 16, 32, PAGE_OF_KV_TILES, 96, 2 * PAGE_OF_KV_TILES):
        for heads in (1, 16, 20, 32, 64, 128):
            tile, plain = (latent_decode_tile(arch, heads, size) for size in (page_size, 1))
            assert not plain.paged and tile.split == plain.split and tile.split % tile.block_n == 0
            assert page_size % tile.block_n == 0 if tile.paged else tile == plain
        tile, plain = (latent_extend_tile(arch, size) for size in (page_size, 1))
        # Of one width, or the bits of a result would depend on the page size.
        assert not plain.paged and tile.split == plain.split and tile.block_n == plain.block_n
        assert page_size % tile.block_n == 0 if tile.paged else tile == plain
