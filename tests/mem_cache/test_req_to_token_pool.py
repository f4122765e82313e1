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
