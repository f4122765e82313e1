"""Memory for the KV pool before requests need it, and never of a slot in use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeClock
from tercet.managers.touch_ahead import BYTES_AHEAD, SLOW_BYTES_AHEAD, TouchAhead
from tercet.mem_cache.allocator import make_allocator

MIB = 1 << 20


class FakePool:
    """Records which slots were touched. A slot has a MiB, so a slice has two, and takes `slice_s`."""

    bytes_per_slot = MIB
    slice_s = 0.0

    def __init__(self, num_slots: int) -> None:
        self.times = np.zeros(num_slots, dtype=int)
        self.clock = FakeClock()

    def touch(self, start: int, end: int) -> None:
        assert 0 < end - start <= 2 and end <= len(self.times)
        self.times[start:end] += 1
        self.clock.now += self.slice_s


def take(allocator, count: int) -> np.ndarray:
    slots = allocator.alloc_extend(*np.array([[0], [count], [0]], dtype=np.int32))
    assert slots is not None
    return slots


@given(
    st.sampled_from([1, 4]),
    st.integers(1, 150),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200), st.booleans()), max_size=8),
)
def test_free_slots_are_touched_once_up_to_the_limit(
    page_size: int, num_pages: int, history: list[tuple[int, int, bool]]
) -> None:
    size = num_pages * page_size
    allocator, pool = make_allocator(size, page_size), FakePool(size + page_size)
    ahead = TouchAhead(allocator, pool, pool.clock)
    for wanted, num_slices, gives_back in history:
        slots = take(allocator, min(wanted, allocator.num_free))
        used = np.zeros(len(pool.times), dtype=bool)
        used[: allocator.first_unused_slot] = True
        for _ in range(num_slices):
            if not ahead.is_due:
                break
            before = pool.times.copy()
            ahead.touch_slice()
            assert not ((pool.times > before) & used).any(), "a slot that was allocated before"
        if gives_back:
            allocator.free(slots)
    assert pool.times.max(initial=0) <= 1
    while ahead.is_due:
        ahead.touch_slice()
    first = allocator.first_unused_slot
    end = min(first + BYTES_AHEAD // MIB, size + page_size)
    assert (pool.times[first:end] == 1).all() and not pool.times[end:].any()


def test_more_is_touched_once_a_slice_was_slow() -> None:
    allocator, pool = make_allocator(4096, 1), FakePool(4097)
    ahead = TouchAhead(allocator, pool, pool.clock)

    def touched(slice_s: float, limit: int) -> int:
        pool.slice_s = slice_s
        for _ in range(limit):
            if ahead.is_due:
                ahead.touch_slice()
        return int(pool.times.sum())

    few, many = BYTES_AHEAD // MIB, SLOW_BYTES_AHEAD // MIB
    assert touched(1e-4, 4096) == few
    take(allocator, 2)
    assert touched(5e-3, 1) == few + 2
    assert touched(1e-4, 4096) == many + 2
    take(allocator, 202)
    assert touched(1e-4, 4096) == many + 204
    assert pool.times.max() == 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_that_were_given_back_are_used_before_new_ones(page_size: int) -> None:
    allocator = make_allocator(64 * page_size, page_size)
    for _ in range(20):
        allocator.free(take(allocator, 7 * page_size))
    assert allocator.first_unused_slot == 8 * page_size
    allocator.clear()
    take(allocator, 7 * page_size)
    assert allocator.first_unused_slot == 8 * page_size
    take(allocator, page_size)
    assert allocator.first_unused_slot == 9 * page_size


def test_a_slot_may_be_larger_than_a_slice() -> None:
    pool = FakePool(5)
    pool.bytes_per_slot = 3 * MIB
    ahead = TouchAhead(make_allocator(4, 1), pool, pool.clock)
    for _ in range(4):
        assert ahead.is_due
        ahead.touch_slice()
    assert not ahead.is_due and pool.times.tolist() == [0, 1, 1, 1, 1]
