from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.mem_cache import allocator as allocator_module
from tercet.mem_cache.allocator import (
    BaseAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    make_allocator,
)

PAGE_SIZES = [1, 4, 16]


def i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def last_slot(slots: list[int]) -> int:
    return slots[-1] if slots else 0


def check_sequence(slots: list[int], page_size: int) -> None:
    """A position lies at its own offset in a page, and a page holds neighbours of one sequence."""
    for position, slot in enumerate(slots):
        assert slot >= page_size, "the dummy page was given out"
        if position % page_size:
            assert slot == slots[position - 1] + 1
        else:
            assert slot % page_size == 0


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[tuple[str, list[int]]]]:
    """(page size, pages in the pool, operations with one number for each sequence that they touch)."""
    numbers = st.lists(st.integers(0, 40), min_size=1, max_size=6)
    operations = st.tuples(st.sampled_from(["extend", "extend", "decode", "free"]), numbers)
    return draw(st.sampled_from(PAGE_SIZES)), draw(st.integers(1, 24)), draw(st.lists(operations, max_size=25))


@given(histories())
def test_sequences_that_grow_and_go_never_share_or_lose_a_slot(
    history: tuple[int, int, list[tuple[str, list[int]]]],
) -> None:
    page_size, num_pages, operations = history
    allocator = make_allocator(num_pages * page_size, page_size)
    sequences: list[list[int]] = [[] for _ in range(6)]

    def pages_of(length: int) -> int:
        return -(-length // page_size)

    for operation, numbers in operations:
        batch = sequences[: len(numbers)]
        before = i32(*map(len, batch))
        last = i32(*map(last_slot, batch))
        num_free = allocator.num_free
        if operation == "free":
            for sequence in batch[: 1 + numbers[0] % len(batch)]:
                # Freed in any order: only which pages they touch counts.
                allocator.free(np.random.default_rng(len(sequence)).permutation(i32(*sequence)))
                sequence.clear()
        else:
            grow = numbers if operation == "extend" else [1] * len(batch)
            after = before + i32(*grow)
            needed = sum(pages_of(b) - pages_of(a) for a, b in zip(before, after, strict=True)) * page_size
            assert allocator.tokens_needed(before, after) == needed
            if operation == "extend":
                slots = allocator.alloc_extend(before, after, last)
            else:
                slots = allocator.alloc_decode(after, last)
            assert (slots is None) == (needed > num_free)
            assert allocator.num_free == num_free - (0 if slots is None else needed)
            if slots is not None:
                assert slots.dtype == np.int32 and len(slots) == sum(grow)
                for sequence, part in zip(batch, np.split(slots, np.cumsum(grow)[:-1]), strict=True):
                    sequence.extend(part.tolist())
        for sequence in sequences:
            check_sequence(sequence, page_size)
        allocator.audit(i32(*(slot for sequence in sequences for slot in sequence)))
        pages_out = sum(pages_of(len(sequence)) for sequence in sequences)
        assert allocator.num_free == allocator.size - pages_out * page_size


def take(allocator: BaseAllocator, count: int) -> np.ndarray:
    slots = allocator.alloc_extend(i32(0), i32(count), i32(0))
    assert slots is not None
    return slots


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_returned", [8, 400])
def test_a_request_gets_neighbouring_slots_however_they_were_freed(page_size: int, num_returned: int) -> None:
    allocator = make_allocator(512 * page_size, page_size)
    slots = take(allocator, 512 * page_size)
    chosen = slots[64 * page_size : (64 + num_returned) * page_size]
    pages = np.random.default_rng(0).permutation(chosen.reshape(-1, page_size))
    for page in pages:
        allocator.free(page)
    again = take(allocator, num_returned * page_size)
    np.testing.assert_array_equal(again, chosen)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_is_given_and_taken_is_copied(page_size: int) -> None:
    allocator = make_allocator(8 * page_size, page_size)
    slots = take(allocator, 8 * page_size)
    kept = slots.copy()
    allocator.free(slots)
    slots[:] = 0
    again = take(allocator, 8 * page_size)
    np.testing.assert_array_equal(np.sort(again), np.sort(kept))


def test_a_batch_that_does_not_fit_takes_nothing() -> None:
    allocator = make_allocator(16, 4)
    assert allocator.alloc_extend(i32(0, 0), i32(9, 5), i32(0, 0)) is None
    assert allocator.num_free == 16
    assert len(take(allocator, 13)) == 13
    assert allocator.num_free == 0
    # The first would fit in its last page, the second would not.
    assert allocator.alloc_decode(i32(14, 17), i32(16, 8)) is None
    assert allocator.alloc_decode(i32(14), i32(16)) == i32(17)


def test_empty_batches_are_nothing() -> None:
    for page_size in PAGE_SIZES:
        allocator = make_allocator(16, page_size)
        slots = allocator.alloc_extend(i32(), i32(), i32())
        assert slots is not None and len(slots) == 0
        slots = allocator.alloc_decode(i32(), i32())
        assert slots is not None and len(slots) == 0
        allocator.free(i32())
        assert allocator.num_free == 16


def test_a_page_that_is_named_by_part_is_freed_whole_and_once() -> None:
    allocator = make_allocator(32, 4)
    slots = take(allocator, 16)
    allocator.free(slots[[0, 13, 1, 14]])
    assert allocator.num_free == 24
    allocator.audit(slots[4:12])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_audit_finds_what_is_wrong(page_size: int) -> None:
    allocator = make_allocator(8 * page_size, page_size)
    slots = take(allocator, 4 * page_size)
    allocator.audit(slots)
    with pytest.raises(AssertionError, match="neither free nor owned"):
        allocator.audit(slots[page_size:])
    with pytest.raises(AssertionError, match="owned twice"):
        allocator.audit(np.concatenate((slots, slots[:1])))
    with pytest.raises(AssertionError, match="dummy page"):
        allocator.audit(np.concatenate((slots, i32(0))))
    with pytest.raises(AssertionError, match="outside the pool"):
        allocator.audit(np.concatenate((slots, i32(9 * page_size))))
    allocator.free(slots[:page_size])
    with pytest.raises(AssertionError, match="both free and owned"):
        allocator.audit(slots)
    allocator.free(slots[:page_size])
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.audit(slots[page_size:])


def test_a_free_list_with_more_than_the_pool_is_caught_at_once() -> None:
    allocator = make_allocator(8, 1)
    slots = take(allocator, 8)
    allocator.free(slots[:4])
    allocator.free(slots[:4])
    with pytest.raises(AssertionError, match="ever allocated"):
        allocator.free(slots[:1])


def test_a_refill_sorts_a_bounded_part_unless_more_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_module, "_MAX_SORTED", 100)
    allocator = make_allocator(1000, 1)
    slots = take(allocator, 1000)
    shuffled = np.random.default_rng(0).permutation(slots)
    allocator.free(shuffled)
    first = take(allocator, 10)
    np.testing.assert_array_equal(first, np.sort(shuffled[-100:])[:10])
    second = take(allocator, 500)
    assert (np.diff(second) > 0).all()
    third = take(allocator, 490)
    assert allocator.num_free == 0
    np.testing.assert_array_equal(np.sort(np.concatenate((first, second, third))), slots)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_clear_makes_everything_free(page_size: int) -> None:
    allocator = make_allocator(8 * page_size, page_size)
    allocator.free(take(allocator, 5 * page_size)[:page_size])
    allocator.clear()
    assert allocator.num_free == allocator.size == 8 * page_size
    np.testing.assert_array_equal(take(allocator, allocator.size), np.arange(page_size, 9 * page_size))


@pytest.mark.parametrize(("size", "page_size"), [(0, 1), (6, 4), (2, 4), (16, 0), (2**31 - 1, 1)])
def test_a_pool_that_cannot_be_is_refused(size: int, page_size: int) -> None:
    with pytest.raises(ValueError, match=r"must (be|fit)"):
        make_allocator(size, page_size)


def test_the_page_size_chooses_the_allocator() -> None:
    assert isinstance(make_allocator(8, 1), TokenToKVPoolAllocator)
    assert isinstance(make_allocator(8, 2), PagedTokenToKVPoolAllocator)
