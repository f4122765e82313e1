"""Which slots of the KV pool are free.

A slot holds K and V of one token in every layer. Slots come in pages of `page_size`; a page holds consecutive
positions of one sequence in consecutive slots. Page 0 (slot 0 when the page size is 1) is a dummy: it is
never given out, so that the writes of padded batch entries have somewhere harmless to go.

Free units (slots, or pages) live in two places: a sorted run that allocations consume from its low end, and a
pile of returned ones in the order they came. Only when the run is too short for an allocation is the top of the
pile merged into it. So a request gets neighbouring, ascending slots wherever there are any (its KV is read in
long strides), freeing is one copy, allocating is one slice, and each unit is sorted once per trip through the
pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from .page_ledger import PageLedger

# Units that one refill sorts at most, unless a single allocation wants more: under half a millisecond, where sorting
# all of a pool of a million slots would hold up the scheduler for tens of them.
_MOST_SORTED = 65536
# Free units that one slice of an audit looks at.
_MAX_SLICE_UNITS = 32768


class _FreeList:
    """Unit numbers 1..num_units, each free or out. An operation is a few numpy calls over what it moves."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        # Never written after it is made: a refill makes a new one.
        self._run: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._run_start = 0
        self._returned: npt.NDArray[np.int32] = np.empty(num_units, dtype=np.int32)
        self._num_returned = 0
        self.num_free = 0
        self.clear()

    def clear(self) -> None:
        self._run = np.arange(1, self.num_units + 1, dtype=np.int32)
        self._run_start = 0
        self._num_returned = 0
        self.num_free = self.num_units

    def take(self, count: int) -> npt.NDArray[np.int32]:
        """int32 [count], ascending; the caller has checked that `count <= num_free`."""
        num_missing = count - (len(self._run) - self._run_start)
        if num_missing > 0:
            self._refill(max(num_missing, _MOST_SORTED))
        start = self._run_start
        self._run_start = start + count
        self.num_free -= count
        # A copy, so that a small answer that is kept does not keep the whole run alive.
        return self._run[start : start + count].copy()

    def give(self, units: npt.NDArray[np.int32]) -> None:
        end = self._num_returned + len(units)
        assert self.num_free + len(units) <= self.num_units, "more was freed than was ever allocated"
        self._returned[self._num_returned : end] = units
        self._num_returned = end
        self.num_free += len(units)

    def slices(self) -> Iterator[npt.NDArray[np.int32]]:
        """Every free unit, in no particular order, as views of at most `_MAX_SLICE_UNITS` units."""
        for units in (self._run[self._run_start :], self._returned[: self._num_returned]):
            for start in range(0, len(units), _MAX_SLICE_UNITS):
                yield units[start : start + _MAX_SLICE_UNITS]

    def _refill(self, most: int) -> None:
        """Move up to `most` units, the last ones returned, from the pile into the run."""
        left = max(self._num_returned - most, 0)
        self._run = np.concatenate((self._run[self._run_start :], self._returned[left : self._num_returned]))
        self._run.sort()
        self._run_start = 0
        self._num_returned = left


class BaseAllocator(ABC):
    """Gives out and takes back slots. `size`: tokens in the pool, without the dummy page.

    Nothing here evicts: an allocation that does not fit answers None and changes nothing, and the caller
    makes room.
    """

    def __init__(self, size: int, page_size: int) -> None:
        """Raises ValueError when `size` is no positive multiple of `page_size`, or does not fit in int32."""
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
        """Tokens that can be allocated now (whole free pages)."""
        return self._free.num_free * self.page_size

    @abstractmethod
    def tokens_needed(self, prefix_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> int:
        """What growing from `prefix_lens` to `seq_lens` (int32 [B] each) would take from `num_free`."""

    @abstractmethod
    def alloc_extend(
        self,
        prefix_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        last_slots: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32] | None:
        """Slots for positions [prefix_lens[i], seq_lens[i]) of each sequence i, one sequence after the other.

        All arguments int32 [B]; `last_slots[i]` is the slot of position `prefix_lens[i] - 1` (0 without a
        prefix), whose page is filled up first. Returns int32 [sum(seq_lens - prefix_lens)], or None when the
        pool is too short for all.
        """

    @abstractmethod
    def alloc_decode(
        self, seq_lens: npt.NDArray[np.int32], last_slots: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32] | None:
        """One more slot for each sequence: int32 [B], or None when the pool is too short for all.

        `seq_lens`: int32 [B], lengths with the new token; `last_slots`: int32 [B], slot of the token before
        it (0: none).
        """

    @abstractmethod
    def free(self, slots: npt.NDArray[np.int32]) -> None:
        """Take back int32 [n] slots, in any order, and copy them. Pages touched are freed whole, each once.

        The caller owns all of each page that it names. Only an audit finds a slot that was freed twice.
        """

    def clear(self) -> None:
        """Make every slot free again."""
        self._free.clear()

    def audit(self, owned_slots: npt.NDArray[np.int32]) -> None:
        """Runs `audit_slices` to its end. `owned_slots`: int32 [m], every slot held outside the allocator."""
        for _ in self.audit_slices([owned_slots]):
            pass

    def audit_slices(self, owned_slots: Iterable[npt.NDArray[np.int32]]) -> Iterator[None]:
        """Checks that free pages and the pages of `owned_slots` are together each page of the pool, once.

        Works in slices: yields after each array of `owned_slots` and after each `_MAX_SLICE_UNITS` free pages. Nothing
        may be allocated or freed before it ends.

        `owned_slots`: int32 arrays of slots, together every slot held outside the allocator (by the cache, and by
        requests for themselves). A slot may be named only once, and the slots of one page stand in one array. Slots at
        a page's end that no array names go with their page.

        Raises AssertionError that names slots freed twice, leaked or shared.
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
    """Page size 1: slots 1..size, each on its own."""

    def __init__(self, size: int) -> None:
        super().__init__(size, page_size=1)

    def tokens_needed(self, prefix_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> int:
        return int((seq_lens - prefix_lens).sum())

    def alloc_extend(
        self,
        prefix_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        last_slots: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32] | None:
        count = int((seq_lens - prefix_lens).sum())
        return None if count > self._free.num_free else self._free.take(count)

    def alloc_decode(
        self, seq_lens: npt.NDArray[np.int32], last_slots: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32] | None:
        count = len(seq_lens)
        return None if count > self._free.num_free else self._free.take(count)

    def free(self, slots: npt.NDArray[np.int32]) -> None:
        self._free.give(slots)


class PagedTokenToKVPoolAllocator(BaseAllocator):
    """Pages 1..size/page_size; page p is the slots [p * page_size, (p + 1) * page_size)."""

    def __init__(self, size: int, page_size: int) -> None:
        super().__init__(size, page_size)
        self._page_offsets = np.arange(page_size, dtype=np.int32)

    def _num_pages(self, num_tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Pages that hold `num_tokens` tokens, elementwise."""
        return (num_tokens + (self.page_size - 1)) // self.page_size

    def tokens_needed(self, prefix_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> int:
        return int((self._num_pages(seq_lens) - self._num_pages(prefix_lens)).sum()) * self.page_size

    def alloc_extend(
        self,
        prefix_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        last_slots: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32] | None:
        page_size = self.page_size
        num_pages_after = self._num_pages(seq_lens)
        num_new = int((num_pages_after - self._num_pages(prefix_lens)).sum())
        if num_new > self._free.num_free:
            return None
        # The pages that each sequence will write: its half-full last page, if it has one, then new ones.
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
        # All slots of those pages, then of each sequence the stretch that is new.
        page_slots = (pages[:, None] * page_size + self._page_offsets).ravel()
        lens = seq_lens - prefix_lens
        ends = np.cumsum(lens)
        shift = touched_start * page_size + first_page_used - (ends - lens)
        wanted = np.repeat(shift, lens)
        wanted += np.arange(len(wanted))
        slots: npt.NDArray[np.int32] = page_slots[wanted]
        return slots

    def alloc_decode(
        self, seq_lens: npt.NDArray[np.int32], last_slots: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32] | None:
        # A page is full when the length before the new token is a multiple of the page size.
        needs_page = seq_lens % self.page_size == (1 % self.page_size)
        num_new = int(np.count_nonzero(needs_page))
        if num_new > self._free.num_free:
            return None
        slots: npt.NDArray[np.int32] = last_slots + 1
        if num_new:
            slots[needs_page] = self._free.take(num_new) * self.page_size
        return slots

    def free(self, slots: npt.NDArray[np.int32]) -> None:
        if not len(slots):
            return
        pages = slots // self.page_size
        # Slots mostly come in runs of a page: dropping neighbours first leaves little for the sort in
        # np.unique.
        changes = np.empty(len(pages), dtype=np.bool_)
        changes[0] = True
        np.not_equal(pages[1:], pages[:-1], out=changes[1:])
        self._free.give(np.unique(pages[changes]))


def make_allocator(size: int, page_size: int) -> BaseAllocator:
    """The allocator for a pool of `size` tokens. Raises ValueError as BaseAllocator does."""
    return TokenToKVPoolAllocator(size) if page_size == 1 else PagedTokenToKVPoolAllocator(size, page_size)
