"""The ledger of an audit: it records each page of a pool as free or owned, and finds pages recorded twice or never."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from ..srt.arrays import Int32Array

_MAX_NAMED = 16
"""Most pages that an error names."""


class PageUse(IntEnum):
    """The state of a page, as far as the audit has found it."""

    UNKNOWN = 0
    FREE = 1
    OWNED = 2


class PageLedger:
    """One `PageUse` for each page of a pool. Every method raises AssertionError for a page with two uses or none."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._num_known = 0
        # np.zeros takes memory only where it is written, so a new ledger for millions of pages is cheap.
        self._uses: npt.NDArray[np.uint8] = np.zeros(num_pages + 1, dtype=np.uint8)

    def add_free(self, pages: Int32Array) -> None:
        """Record pages: int32 [n] of the allocator's free list."""
        pages = np.sort(pages)
        _check_distinct(pages, "pages freed twice")
        self._add(pages, PageUse.FREE)

    def add_owned(self, slots: Int32Array, page_size: int) -> None:
        """Record the pages of slots: int32 [n], which are allocated. The slots of one page must be in one call."""
        slots = np.sort(slots)
        _check_distinct(slots, "slots owned twice")
        pages = slots // page_size
        self._add(pages[np.diff(pages, prepend=-1) != 0], PageUse.OWNED)

    def check_complete(self) -> None:
        """Raise AssertionError unless each page has been recorded."""
        if self._num_known != self._num_pages:
            leaked = np.flatnonzero(self._uses[1:] == PageUse.UNKNOWN) + 1
            raise AssertionError(f"{len(leaked)} pages neither free nor owned: {leaked[:_MAX_NAMED].tolist()}")

    def _add(self, pages: Int32Array, use: PageUse) -> None:
        """Record `pages`, which are sorted and distinct."""
        if len(pages) and (pages[0] < 1 or pages[-1] > self._num_pages):
            raise AssertionError("a slot outside the pool, or of the dummy page, is free or owned")
        before = self._uses[pages]
        twice = pages[before != PageUse.UNKNOWN]
        if len(twice):
            same = bool((before[before != PageUse.UNKNOWN] == use).all())
            what = "both free and owned" if not same else "freed twice" if use is PageUse.FREE else "owned twice"
            raise AssertionError(f"{len(twice)} pages {what}: {twice[:_MAX_NAMED].tolist()}")
        self._uses[pages] = use
        self._num_known += len(pages)


def _check_distinct(values: Int32Array, what: str) -> None:
    """Raise AssertionError when `values`, which are sorted, contain an equal pair."""
    twice = values[1:][values[1:] == values[:-1]]
    if len(twice):
        raise AssertionError(f"{len(twice)} {what}: {twice[:_MAX_NAMED].tolist()}")
