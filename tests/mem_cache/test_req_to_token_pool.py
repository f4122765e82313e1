from __future__ import annotations

import numpy as np
import pytest

from tercet.mem_cache.req_to_token_pool import ReqToTokenPool


def test_each_row_is_given_once_and_row_0_never() -> None:
    pool = ReqToTokenPool(num_rows=5, context_len=8)
    assert pool.req_to_token.shape == (6, 8) and pool.req_to_token.dtype == np.int32
    assert sorted(pool.alloc() or 0 for _ in range(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert pool.alloc() is None


def test_a_freed_row_comes_back_and_keeps_the_padding_row_clean() -> None:
    pool = ReqToTokenPool(num_rows=2, context_len=4)
    rows = [pool.alloc(), pool.alloc()]
    assert None not in rows
    pool.req_to_token[rows[0]] = 7
    assert rows[0] is not None
    pool.free(rows[0])
    assert pool.num_free == 1
    assert pool.alloc() == rows[0]
    assert not pool.req_to_token[0].any()


@pytest.mark.parametrize("row", [0, 2, 4, -1])
def test_freeing_a_row_that_is_not_out_is_caught(row: int) -> None:
    pool = ReqToTokenPool(num_rows=3, context_len=4)
    assert pool.alloc() == 1
    with pytest.raises(AssertionError, match="not allocated"):
        pool.free(row)


def test_clear_frees_every_row() -> None:
    pool = ReqToTokenPool(num_rows=3, context_len=4)
    pool.alloc()
    pool.alloc()
    pool.clear()
    assert pool.num_free == 3
    assert {pool.alloc(), pool.alloc(), pool.alloc()} == {1, 2, 3}


@pytest.mark.parametrize(("num_rows", "context_len"), [(0, 4), (4, 0)])
def test_an_empty_table_is_refused(num_rows: int, context_len: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ReqToTokenPool(num_rows, context_len)


def test_a_runner_hears_of_every_write_but_those_of_new_tokens() -> None:
    pool = ReqToTokenPool(3, 8)
    theirs = np.zeros_like(pool.req_to_token)
    pool.write(1, 0, np.array([5, 6, 7], np.int32))
    pool.write(2, 2, np.array([], np.int32))
    rows, starts, lens = np.array([[1, 3, 2], [3, 0, 5], [1, 2, 3]], np.int32)
    pool.write_new(rows, starts, lens, np.array([8, 11, 12, 13, 14, 15], np.int32))
    pool.write_next(np.array([1, 2], np.int32), np.array([4, 0], np.int32), np.array([9, 10], np.int32))
    updates = pool.take_updates()
    assert [(update.row, update.start, update.slots.tolist()) for update in updates] == [(1, 0, [5, 6, 7])]
    for row, start, slots in updates:
        theirs[row, start : start + len(slots)] = slots
    # Those that the steps themselves name.
    theirs[1, 3:5], theirs[2, 0], theirs[3, :2], theirs[2, 5:] = (8, 9), 10, (11, 12), (13, 14, 15)
    assert np.array_equal(theirs, pool.req_to_token)
    assert pool.take_updates() == []


def test_a_position_that_was_written_twice_travels_as_it_is_now() -> None:
    """A row may change its owner between two steps. A device takes updates in any order."""
    pool = ReqToTokenPool(1, 8)
    pool.write(1, 0, np.array([5, 6, 7], np.int32))
    pool.write(1, 1, np.array([3], np.int32))
    first, second = pool.take_updates()
    assert first.slots.tolist() == [5, 3, 7] and second.slots.tolist() == [3]
    pool.req_to_token[1, 0] = 99
    assert first.slots[0] == 5  # a step in flight does not see what comes later
