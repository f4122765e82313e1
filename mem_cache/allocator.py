"""Allocators: which slots of the KV pool are free.

A slot holds K and V of one token in every layer. A page is `page_size` consecutive slots, which hold consecutive
positions of one sequence. Page 0 (slot 0 when the page size is 1) is a dummy: it is never allocated, and padded batch
entries write to it.

The free list keeps its units (pages, or slots when the page size is 1) in three places: a sorted run, a stack of freed
units in the order of their return, and the units that were never allocated. An allocation takes the low end of the run.
When the run is too short, the top of the stack is merged into it. Units that were never allocated come last. So

- a request gets adjacent, ascending slots where possible, and its KV is read sequentially,
- allocating is one slice, and freeing is one copy,
- a unit is sorted once between two allocations of it,
- a pool in host memory, which the system provides on first access, takes no more memory than its users needed at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np

from ..srt.arrays import Int32Array
from .page_ledger import PageLedger

# Most units that a refill takes from the stack, unless one allocation needs more. Sorting them takes less than half a
# millisecond. Sorting a pool of a million slots would stop the scheduler for tens of milliseconds.
_MAX_SORTED = 65536
# Most free units that one slice of an audit checks.
_MAX_SLICE_UNITS = 32768


class _FreeList:
    """The free units among 1..num_units. Each operation is a few numpy calls on the units that it moves."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.num_free = num_units
        self.first_unused = 1
        """The lowest unit that was never allocated, and neither was any above it."""
        # Read-only: a refill makes a new array.
        self._run: Int32Array = np.empty(0, dtype=np.int32)
        self._run_start = 0
        self._returned: Int32Array = np.empty(num_units, dtype=np.int32)
        self._num_returned = 0

    def clear(self) -> None:
        self._run = np.arange(1, self.first_unused, dtype=np.int32)
        self._run_start = 0
        self._num_returned = 0
        self.num_free = self.num_units

    def take(self, count: int) -> Int32Array:
        """Allocate `count` units, at most `num_free`. Returns int32 [count], ascending."""
        num_missing = count - (len(self._run) - self._run_start)
        if num_missing > 0 and self._num_returned:
            self._refill(max(num_missing, _MAX_SORTED))
        start = self._run_start
        # A view that the caller keeps would keep the whole run in memory.
        taken = self._run[start : start + count].copy()
        self._run_start = start + len(taken)
        self.num_free -= count
        num_new = count - len(taken)
        if num_new:
            new = np.arange(self.first_unused, self.first_unused + num_new, dtype=np.int32)
            self.first_unused += num_new
            taken = np.concatenate((taken, new)) if len(taken) else new
        return taken

    def give(self, units: Int32Array) -> None:
        """Take back allocated units, in any order."""
        end = self._num_returned + len(units)
        assert self.num_free + len(units) <= self.num_units, "more was freed than was ever allocated"
        self._returned[self._num_returned : end] = units
        self._num_returned = end
        self.num_free += len(units)

    def slices(self) -> Iterator[Int32Array]:
        """Yield all free units, in no particular order, in read-only arrays of at most `_MAX_SLICE_UNITS` units."""
        for units in (self._run[self._run_start :], self._returned[: self._num_returned]):
            for start in range(0, len(units), _MAX_SLICE_UNITS):
                yield units[start : start + _MAX_SLICE_UNITS]
        for start in range(self.first_unused, self.num_units + 1, _MAX_SLICE_UNITS):
            yield np.arange(start, min(start + _MAX_SLICE_UNITS, self.num_units + 1), dtype=np.int32)

    def _refill(self, max_units: int) -> None:
        """Move the units that were freed last, at most `max_units` of them, from the stack into the run."""
        left = max(self._num_returned - max_units, 0)
        self._run = np.concatenate((self._run[self._run_start :], self._returned[left : self._num_returned]))
        self._run.sort()
        self._run_start = 0
        self._num_returned = left


class BaseAllocator(ABC):
    """Allocates and frees slots. `size`: tokens in the pool, without the dummy page.

    An allocator never evicts. An allocation that does not fit returns None and changes nothing; the caller evicts
    first.
    """

    def __init__(self, size: int, page_size: int) -> None:
        """Raises ValueError unless `size` is a positive multiple of `page_size` and fits in int32."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        if size < page_size or size % page_size:
            raise ValueError(f"pool size must be a positive multiple of page size {page_size}, got {size}")
        if size + page_size > np.iinfo(np.int32).max:
            raise ValueError(f"the pool size must fit in int32 with its dummy page, got {size}")
        self.size = size
        self.page_size = page_size
        self._free = _FreeList(size // page_size)

    @property
    def num_free(self) -> int:
        """Tokens that fit in the free pages."""
        return self._free.num_free * self.page_size

    @property
    def first_unused_slot(self) -> int:
        """No slot from this one on was ever allocated. The pool ends before slot `size + page_size`."""
        return self._free.first_unused * self.page_size

    @abstractmethod
    def tokens_needed(self, prefix_lens: Int32Array, seq_lens: Int32Array) -> int:
        """Tokens that an allocation from `prefix_lens` to `seq_lens` takes from `num_free`. Both are int32 [B]."""

    @abstractmethod
    def alloc_extend(
        self,
        prefix_lens: Int32Array,
        seq_lens: Int32Array,
        last_slots: Int32Array,
    ) -> Int32Array | None:
        """Allocate slots for positions [prefix_lens[i], seq_lens[i]) of each sequence i.

        All arguments are int32 [B]. `last_slots[i]` is the slot of position `prefix_lens[i] - 1`; the rest of its page
        is filled first. It is not read if that page is full, or without a prefix. Returns
        int32 [sum(seq_lens - prefix_lens)], one sequence after the other, or None when the free pages do not suffice
        for all sequences.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: Int32Array, last_slots: Int32Array) -> Int32Array | None:
        """Allocate one more slot for each sequence: int32 [B], or None when the free pages do not suffice for all.

        `seq_lens`: int32 [B], lengths with the new token. `last_slots`: int32 [B], slot of the token before the new
        one. It is not read if the new token begins a page.
        """

    @abstractmethod
    def free(self, slots: Int32Array) -> None:
        """Free the pages of `slots`: int32 [n], in any order. The array is copied.

        The caller must own the whole of each page. A page named several times in one call is freed once; a page freed
        again by a later call is found only by an audit.
        """

    def clear(self) -> None:
        """Make every slot free again."""
        self._free.clear()

    def audit(self, owned_slots: Int32Array) -> None:
        """Run `audit_slices` to its end. `owned_slots`: int32 [m], all slots that are allocated."""
        for _ in self.audit_slices([owned_slots]):
            pass

    def audit_slices(self, owned_slots: Iterable[Int32Array]) -> Iterator[None]:
        """Check that each page of the pool is either free or owned, and only once.

        Yields after each array of `owned_slots` and after each `_MAX_SLICE_UNITS` free pages. The caller must not
        allocate or free before the last slice.

        `owned_slots`: int32 arrays that together name the slots of all allocated pages: the cache's and the private
        ones of requests. A slot appears only once, and the slots of one page appear in one array. A page's unused last
        slots may be left out.

        Raises AssertionError that names the pages freed twice, leaked or shared.
        """
        ledger = PageLedger(self.size // self.page_size)
        for slots in owned_slots:
            ledger.add_owned(slots, self.page_size)
            yield
        for pages in self._free.slices():
            ledger.add_free(pages)
            yield
        ledger.check_complete()


class TokenToKVPoolAllocator(BaseAllocator):
    """The allocator of single slots, 1..size (page size 1)."""

    def __init__(self, size: int) -> None:
        super().__init__(size, page_size=1)

    def tokens_needed(self, prefix_lens: Int32Array, seq_lens: Int32Array) -> int:
        return int((seq_lens - prefix_lens).sum())

    def alloc_extend(
        self,
        prefix_lens: Int32Array,
        seq_lens: Int32Array,
        last_slots: Int32Array,
    ) -> Int32Array | None:
        count = int((seq_lens - prefix_lens).sum())
        return None if count > self._free.num_free else self._free.take(count)

    def alloc_decode(self, seq_lens: Int32Array, last_slots: Int32Array) -> Int32Array | None:
        count = len(seq_lens)
        return None if count > self._free.num_free else self._free.take(count)

    def free(self, slots: Int32Array) -> None:
        self._free.give(slots)


class PagedTokenToKVPoolAllocator(BaseAllocator):
    """The allocator of pages 1..size/page_size. Page p is the slots [p * page_size, (p + 1) * page_size)."""

    def __init__(self, size: int, page_size: int) -> None:
        super().__init__(size, page_size)
        self._page_offsets = np.arange(page_size, dtype=np.int32)

    def _num_pages(self, num_tokens: Int32Array) -> Int32Array:
        """The number of pages that hold `num_tokens` tokens, elementwise."""
        return (num_tokens + (self.page_size - 1)) // self.page_size

    def tokens_needed(self, prefix_lens: Int32Array, seq_lens: Int32Array) -> int:
        return int((self._num_pages(seq_lens) - self._num_pages(prefix_lens)).sum()) * self.page_size

    def alloc_extend(
        self,
        prefix_lens: Int32Array,
        seq_lens: Int32Array,
        last_slots: Int32Array,
    ) -> Int32Array | None:
        page_size = self.page_size
        num_pages_after = self._num_pages(seq_lens)
        num_new = int((num_pages_after - self._num_pages(prefix_lens)).sum())
        if num_new > self._free.num_free:
            return None
        # The pages that each sequence writes: its partly filled last page, if there is one, then new pages.
        first_page_used = prefix_lens % page_size
        num_touched = num_pages_after - prefix_lens // page_size
        touched_end = np.cumsum(num_touched)
        touched_start = touched_end - num_touched
        pages = np.empty(int(touched_end[-1]) if len(touched_end) else 0, dtype=np.int32)
        is_old = np.zeros(len(pages), dtype=np.bool_)
        has_old = first_page_used > 0
        old_at = touched_start[has_old]
        is_old[old_at] = True
        pages[old_at] = last_slots[has_old] // page_size
        pages[~is_old] = self._free.take(num_new)
        # First all slots of those pages, then, for each sequence, the slots of its new positions.
        page_slots = (pages[:, None] * page_size + self._page_offsets).ravel()
        lens = seq_lens - prefix_lens
        ends = np.cumsum(lens)
        shift = touched_start * page_size + first_page_used - (ends - lens)
        wanted = np.repeat(shift, lens)
        wanted += np.arange(len(wanted))
        slots: Int32Array = page_slots[wanted]
        return slots

    def alloc_decode(self, seq_lens: Int32Array, last_slots: Int32Array) -> Int32Array | None:
        # A page is full when the length before the new token is a multiple of the page size.
        needs_page = seq_lens % self.page_size == (1 % self.page_size)
        num_new = int(np.count_nonzero(needs_page))
        if num_new > self._free.num_free:
            return None
        slots: Int32Array = last_slots + 1
        if num_new:
            slots[needs_page] = self._free.take(num_new) * self.page_size
        return slots

    def free(self, slots: Int32Array) -> None:
        if not len(slots):
            return
        pages = slots // self.page_size
        # The slots of a page are mostly neighbours: dropping equal neighbours leaves little for np.unique to sort.
        changes = np.empty(len(pages), dtype=np.bool_)
        changes[0] = True
        np.not_equal(pages[1:], pages[:-1], out=changes[1:])
        self._free.give(np.unique(pages[changes]))


def make_allocator(size: int, page_size: int) -> BaseAllocator:
    """Make the allocator for a pool of `size` tokens. Raises ValueError as BaseAllocator does."""
    return TokenToKVPoolAllocator(size) if page_size == 1 else PagedTokenToKVPoolAllocator(size, page_size)
