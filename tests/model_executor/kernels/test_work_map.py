from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels import work_map
from tercet.model_executor.kernels.work_map import (
    query_split_map,
    query_split_map_ref,
    query_tile_map,
    query_tile_map_ref,
    split_map,
    split_map_ref,
)


@settings(max_examples=examples(60))
@given(
    lens=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 40)), min_size=1, max_size=40),
    split=st.sampled_from([16, 32, 256]),
    mixed=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    room=st.integers(0, 5),
    block=st.sampled_from([16, 1024]),
)
def test_splits_are_the_twins(lens, split, mixed, dtype, room, block) -> None:
    seq_lens = torch.tensor([prefix for prefix, _ in lens], dtype=dtype)
    starts = torch.nn.functional.pad(torch.tensor([new for _, new in lens]).cumsum(0), (1, 0)) if mixed else None
    rows = torch.arange(len(lens), dtype=dtype).flip(0) * 3 + 1
    reference = split_map_ref(seq_lens, rows, split, starts)
    total = len(reference.rows)
    with mock.patch.object(work_map, "_BATCH_BLOCK", block):
        work = split_map(seq_lens, rows, split, total + room, starts)
    assert torch.equal(work.starts, reference.starts) and torch.equal(work.rows[:total], reference.rows)
    assert work.records is not None and torch.equal(work.records[:total], reference.records)


@settings(max_examples=examples(60))
@given(
    new=st.lists(st.integers(0, 100), min_size=1, max_size=40),
    group=st.integers(1, 9),
    block_m=st.sampled_from([16, 128]),
)
def test_query_tiles_are_the_twins(new, group, block_m) -> None:
    starts = torch.nn.functional.pad(torch.tensor(new).cumsum(0), (1, 0))
    work = query_tile_map(starts, group, block_m, int(starts[-1]))
    reference = query_tile_map_ref(starts, group, block_m)
    total = len(reference.rows)
    assert total <= work.capacity
    assert torch.equal(work.starts, reference.starts) and torch.equal(work.rows[:total], reference.rows)


@settings(max_examples=examples(40))
@given(
    lens=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 100)), min_size=1, max_size=40),
    group=st.integers(1, 9),
    block_m=st.sampled_from([16, 128]),
    split=st.sampled_from([16, 256]),
)
def test_query_tiles_and_splits_are_the_twins(lens, group, block_m, split) -> None:
    new = torch.tensor([new for _, new in lens])
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    seq_lens = new + torch.tensor([prefix for prefix, _ in lens])
    reference = query_split_map_ref(starts, seq_lens, group, block_m, split)
    work = query_split_map(starts, seq_lens, group, block_m, split, len(reference.rows))
    total = len(reference.rows)
    assert work.split == reference.split == split
    assert torch.equal(work.starts, reference.starts) and torch.equal(work.rows[:total], reference.rows)


def test_units_beyond_the_capacity_are_not_written() -> None:
    work = split_map(torch.tensor([100, 100]), torch.tensor([1, 2]), 16, 3)
    assert work.rows.tolist() == [0, 0, 0] and work.starts.tolist() == [0, 7, 14]
