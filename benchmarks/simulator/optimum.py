"""The hit rate that no prefix cache of a given size can beat: Belady's rule, with the future known.

A token of a prompt can be found in the cache if an earlier request has computed it with the same tokens before it. Of
all such tokens, the cache keeps those that are looked up again soonest. A token is never looked up without the tokens
before it, so their next use is never later, and what is kept is always whole prefixes. Tokens have equal sizes, so the
rule is optimal (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966), with the freedom not
to keep what was just computed.

Tokens that only ever occur together are one segment of a radix tree, so a lookup costs some segments and not all its
tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...mem_cache.radix_node import common_len

_NEVER = 1 << 60


class _Segment:
    """A run of tokens in the tree. Its end never moves: a split makes a new segment of its first tokens."""

    __slots__ = ("cached_len", "children", "lookups", "parent", "ticket", "tokens")

    def __init__(self, parent: _Segment | None, tokens: np.ndarray) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[bytes, _Segment] = {}
        self.lookups: list[int] = []
        self.cached_len = 0
        self.ticket = 0


class _Event(NamedTuple):
    end: _Segment
    is_lookup: bool


class PrefixTrace:
    """The lookups and insertions of a prefix cache, in their order."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_prompt_tokens = 0
        """Tokens of all prompts that were looked up, with those that a lookup may not find."""
        self._events: list[_Event] = []
        self._roots: dict[str, _Segment] = {}

    def look_up(self, prompt_ids: np.ndarray, namespace: str = "") -> None:
        """A request starts: int32 [n]. It may find all but its last token, in whole pages. It computes the rest."""
        self.num_prompt_tokens += len(prompt_ids)
        self._add(prompt_ids[: len(prompt_ids) - 1], namespace, is_lookup=True)
        self.insert(prompt_ids, namespace)

    def insert(self, token_ids: np.ndarray, namespace: str = "") -> None:
        """The keys and values of these tokens exist now: int32 [n]."""
        self._add(token_ids, namespace, is_lookup=False)

    def best_hits(self, capacity: int) -> int:
        """The most tokens that lookups can find with a cache of `capacity` tokens."""
        for number, event in enumerate(self._events):
            if event.is_lookup:
                for segment in _path(event.end):
                    segment.lookups.append(number)
        try:
            return _Belady(capacity, self.page_size).run(self._events)
        finally:
            for event in self._events:
                for segment in _path(event.end):
                    segment.lookups, segment.cached_len = [], 0

    def _add(self, tokens: np.ndarray, namespace: str, *, is_lookup: bool) -> None:
        page = self.page_size
        tokens = tokens[: len(tokens) // page * page]
        segment = self._roots.setdefault(namespace, _Segment(None, tokens[:0]))
        while len(tokens):
            child = segment.children.get(tokens[:page].tobytes())
            if child is None:
                child = _Segment(segment, tokens.copy())
                segment.children[tokens[:page].tobytes()] = child
            common = common_len(child.tokens, tokens) // page * page
            if common < len(child.tokens):
                child = self._split(child, common)
            tokens = tokens[common:]
            segment = child
        self._events.append(_Event(segment, is_lookup))

    def _split(self, lower: _Segment, length: int) -> _Segment:
        assert lower.parent is not None
        upper = _Segment(lower.parent, lower.tokens[:length])
        lower.parent.children[lower.tokens[: self.page_size].tobytes()] = upper
        lower.tokens = lower.tokens[length:]
        lower.parent = upper
        upper.children[lower.tokens[: self.page_size].tobytes()] = lower
        return upper


class _Belady:
    """One run over the events of a complete tree."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self._capacity = capacity // page_size * page_size
        self._page_size = page_size
        self._used = 0
        self._ticket = 0
        # Latest next use first, then deepest first. An entry whose ticket is not the segment's is void.
        self._heap: list[tuple[int, int, int, _Segment]] = []

    def run(self, events: Sequence[_Event]) -> int:
        num_hits = 0
        for number, event in enumerate(events):
            path = _path(event.end)
            if event.is_lookup:
                num_hits += sum(segment.cached_len for segment in path)
            for depth, segment in enumerate(path):
                self._keep(segment, depth, number)
            while self._used > self._capacity:
                self._evict()
        return num_hits

    def _keep(self, segment: _Segment, depth: int, number: int) -> None:
        place = bisect_right(segment.lookups, number)
        next_use = segment.lookups[place] if place < len(segment.lookups) else _NEVER
        wanted = 0 if next_use == _NEVER else len(segment.tokens)
        self._used += wanted - segment.cached_len
        segment.cached_len = wanted
        self._ticket = segment.ticket = self._ticket + 1
        if wanted:
            heapq.heappush(self._heap, (-next_use, -depth, segment.ticket, segment))

    def _evict(self) -> None:
        entry = heapq.heappop(self._heap)
        *_, ticket, segment = entry
        if ticket != segment.ticket:
            return
        page = self._page_size
        num_freed = min(-(-(self._used - self._capacity) // page) * page, segment.cached_len)
        segment.cached_len -= num_freed
        self._used -= num_freed
        if segment.cached_len:
            heapq.heappush(self._heap, entry)


def _path(end: _Segment) -> list[_Segment]:
    """The segments from the root to `end`, first tokens first."""
    path = []
    segment: _Segment | None = end
    while segment is not None:
        path.append(segment)
        segment = segment.parent
    return path[::-1]
