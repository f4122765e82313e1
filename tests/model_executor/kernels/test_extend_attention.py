from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from attention_cases import Case, Problem, assert_close, build, cases, expected_extend, run_extend
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from triton_interpreter import dots_by_rows, examples

from tercet.model_executor.kernels import extend_attention
from tercet.model_executor.kernels.tuning import DecodeTile, ExtendTile, extend_tile

TILES = [ExtendTile(16, 16, 1, 1, 32), ExtendTile(32, 16, 1, 1, 16), ExtendTile(64, 32, 1, 1, 64)]
DECODE_TILE = DecodeTile(32, 16, 1, 1, 2)
PLAIN = Case(0, torch.float32, False, 1, 3, 64, 1, (70,), (20,), None, None, 0.125)


def attend(p: Problem, tile: ExtendTile, *arguments: torch.Tensor, by_unit: bool = False) -> torch.Tensor:
    paged = p.case.page_size % tile.block_n == 0
    return run_extend(p, dataclasses.replace(tile, paged=paged), DECODE_TILE, *arguments, by_unit=by_unit)


def run(p: Problem, tile: ExtendTile, *, by_unit: bool = False) -> torch.Tensor:
    return attend(p, tile, p.q_extend, p.rows, p.extend_start_loc.diff(), p.prefix_lens, by_unit=by_unit)


@settings(max_examples=examples(40))
@given(case=cases(max_len=60), tile=st.sampled_from(TILES))
@example(case=PLAIN, tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(2,), extend_lens=(2,)), tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(90,), extend_lens=(60,), window=5), tile=TILES[2])
@example(case=dataclasses.replace(PLAIN, lens=(40, 33, 9), extend_lens=(40, 1, 5)), tile=TILES[1])
@example(case=dataclasses.replace(PLAIN, lens=(90, 37), extend_lens=(60, 37), page_size=32), tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(90, 33), extend_lens=(60, 2), page_size=32, window=5), tile=TILES[2])
@example(case=dataclasses.replace(PLAIN, lens=(90, 17), extend_lens=(60, 17), has_sinks=True), tile=TILES[0])
def test_agrees_with_the_float64_twin(case: Case, tile: ExtendTile) -> None:
    problem = build(case)
    assert_close(run(problem, tile), expected_extend(problem))


@pytest.mark.parametrize(
    ("new", "prefix", "units"),
    [
        ([10], [32768], 17),  # 8 programs would leave 124 multiprocessors idle
        ([10, 1], [32768, 70000], 17),  # one new token is the decode kernel's
        ([10], [100], None),  # one split
        ([1024], [32768], None),  # 32 query tiles of 8 KV heads fill the device
        ([200], [131072], None),  # too many partial results
    ],
)
def test_few_tokens_after_a_long_prefix_are_split(new: list[int], prefix: list[int], units: int | None) -> None:
    lens = np.array(new, np.int32), np.array(new, np.int32) + np.array(prefix, np.int32)
    starts = torch.nn.functional.pad(torch.tensor(new).cumsum(0), (1, 0))
    with mock.patch.object(extend_attention, "num_multiprocessors", lambda device: 132):
        work = extend_attention.extend_work(starts, torch.from_numpy(lens[1]), *lens, 32, 8, extend_tile("sm_90", 128))
    assert (work.split, work.capacity if work.split else None) == (2048 if units else None, units)


@pytest.mark.parametrize(
    "case", [PLAIN, dataclasses.replace(PLAIN, window=20, dtype=torch.bfloat16)], ids=["", "window"]
)
def test_one_look_up_for_a_tile_changes_no_bits(case: Case) -> None:
    """The same requests, with a look-up for each slot."""
    p = build(dataclasses.replace(case, lens=(90, 37), extend_lens=(60, 37), page_size=32))
    arguments = p.q_extend, p.rows, p.extend_start_loc.diff(), p.prefix_lens
    for tile in TILES:
        assert torch.equal(run_extend(p, tile, DECODE_TILE, *arguments), run(p, tile))


@pytest.mark.parametrize(
    ("arch", "page_size", "options", "paged"),
    [
        ("sm_90", 64, {}, True),
        ("sm_90", 128, {}, True),
        ("sm_90", 32, {}, False),
        ("sm_90", 96, {}, False),
        ("sm_90", 64, {"fp8": True}, False),
        ("sm_90", 64, {"fp32": True}, False),
        ("sm_80", 64, {}, False),
    ],
)
def test_a_tile_is_paged_where_pages_have_whole_tiles(
    arch: str, page_size: int, options: dict[str, bool], paged: bool
) -> None:
    for head_dim in (64, 80, 128):
        tile = extend_tile(arch, head_dim, page_size=page_size, **options)
        assert tile.paged is paged
        assert not paged or page_size % tile.block_n == 0
    assert not extend_tile(arch, 256, page_size=page_size, **options).paged


@settings(max_examples=examples(20))
@given(case=cases(max_len=90, max_requests=2, max_query_rows=80), tile=st.sampled_from(TILES))
@example(case=dataclasses.replace(PLAIN, lens=(150,), extend_lens=(5,)), tile=TILES[1])
@example(case=dataclasses.replace(PLAIN, lens=(150, 40), extend_lens=(9, 2), window=20), tile=TILES[0])
@example(case=dataclasses.replace(PLAIN, lens=(150, 40), extend_lens=(9, 2), has_sinks=True), tile=TILES[0])
def test_splits_as_units_have_the_bits_of_splits_in_turn(case: Case, tile: ExtendTile) -> None:
    problem = build(case)
    assert torch.equal(run(problem, tile, by_unit=True), run(problem, tile))


@pytest.mark.parametrize("by_unit", [False, True])
def test_a_sink_of_minus_infinity_is_none(by_unit: bool) -> None:
    for lens in ((150, 40), (20,)):
        without = build(dataclasses.replace(PLAIN, lens=lens, extend_lens=(9, 2)[: len(lens)]))
        problem = dataclasses.replace(without, sinks=torch.full((3,), -torch.inf))
        assert torch.equal(*(run(p, TILES[0], by_unit=by_unit) for p in (problem, without)))


def test_the_splits_are_merged_and_not_one_softmax() -> None:
    """The results of two lengths of splits differ in their last bits, or the test above would compare nothing."""
    problem = build(dataclasses.replace(PLAIN, lens=(150,), extend_lens=(20,)))
    assert not torch.equal(run(problem, TILES[0]), run(problem, dataclasses.replace(TILES[0], split=2048)))


@settings(max_examples=examples(20))
@given(case=cases(max_len=50, max_requests=4), tile=st.sampled_from(TILES), data=st.data())
def test_a_request_does_not_depend_on_the_batch(case: Case, tile: ExtendTile, data: st.DataObject) -> None:
    problem = build(case)
    everyone = run(problem, tile).split(case.extend_lens)
    queries = problem.q_extend.split(case.extend_lens)
    order = data.draw(st.permutations(range(len(case.lens))))
    pick = list(order[: data.draw(st.integers(1, len(order)))])
    out = attend(
        problem, tile, torch.cat([queries[i] for i in pick]), problem.rows[pick],
        problem.extend_start_loc.diff()[pick], problem.prefix_lens[pick],
    )  # fmt: skip
    assert torch.equal(out, torch.cat([everyone[i] for i in pick]))


@settings(max_examples=examples(20))
@given(case=cases(max_len=60, max_requests=1), tile=st.sampled_from(TILES), cut=st.integers(2, 58))
def test_a_token_does_not_depend_on_the_chunk(case: Case, tile: ExtendTile, cut: int) -> None:
    length = case.lens[0]
    assume(2 <= cut <= length - 2)  # a chunk of one token is the decode kernel's
    problem = build(dataclasses.replace(case, extend_lens=(length,)))
    chunks = torch.tensor([cut]), torch.tensor([length - cut])
    with dots_by_rows():
        whole = run(problem, tile)
        first = attend(problem, tile, problem.q_extend[:cut], problem.rows, chunks[0], torch.tensor([0]))
        rest = attend(
            problem, tile, problem.q_extend[cut:], problem.rows, chunks[1], chunks[0], by_unit=bool(cut % 2)
        )  # fmt: skip
    assert torch.equal(torch.cat([first, rest]), whole)
