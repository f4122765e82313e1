"""The prefix cache of a model with recurrent layers: a prefix can be used only where their state was saved.

Such a layer has one state for all tokens of a request (docs/architecture.md#recurrent-layers). KV alone is not enough
to continue a prefix, so a node of the tree may have a saved state: that after the last token of its prefix.

Source: Marconi (Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..srt.arrays import Int32Array
from .allocator import BaseAllocator
from .base_prefix_cache import CacheNode, Lookup, MatchResult
from .radix_cache import RadixCache
from .radix_lookup import RadixLookup, find
from .radix_node import EMPTY, NO_TICKET, RadixNode


class _StateLookup(Lookup):
    """The length of the longest prefix with a state. It is current as long as its KV and the states on its path are."""

    __slots__ = ("_cache", "kv", "length")

    def __init__(self, cache: RecurrentCache, kv: RadixLookup) -> None:
        """`kv`: the longest prefix with KV."""
        self._cache = cache
        self.kv = kv
        self.length = cache.end_of_state(kv)

    def is_current(self) -> bool:
        return self.kv.is_current() and self._cache.end_of_state(self.kv) == self.length


class RecurrentCache(RadixCache):
    """A radix cache that finds only prefixes with a saved state.

    A saved state is a row of the runner's LayerStates. Each of these rows is free, kept by a node, or taken by a
    request. If no row is free, a state is dropped: the first saved one of those that no request has used. Used ones
    are dropped, the least recently used first, only while they have more than half of the rows. So many prompts that
    are sent once do not displace a common beginning (segmented LRU: Karedla et al., "Caching Strategies to Improve
    Disk System Performance", 1994). In both cases, the states of retained prefixes are dropped last.

    Leaves without a state, which no request can use, are evicted before all other leaves.
    """

    def __init__(self, allocator: BaseAllocator, page_size: int, policy: str, rows: range, **options: Any) -> None:
        """`rows`: of LayerStates, for saved states. The other arguments are those of RadixCache."""
        self._all_rows = rows
        super().__init__(allocator, page_size, policy, **options)
        of_leaf = self._policy
        self._policy = lambda leaf: (leaf in self._row_of, *of_leaf(leaf))

    def reset(self) -> None:
        self._free_rows = list(reversed(self._all_rows))
        self._row_of: dict[Any, int] = {}
        """The row of each node with a state."""
        self._unused: dict[CacheNode, None] = {}
        """The nodes whose state no request has used yet, the first saved one first. The values mean nothing."""
        self._used: dict[CacheNode, None] = {}
        """The other nodes with a state, least recently used first."""
        super().reset()

    # Lookup

    def match(self, tokens: Int32Array, namespace: str = "") -> MatchResult:
        path, _ = self.match_path(tokens, namespace)
        if not path:
            return MatchResult(EMPTY, self._root)
        self._touch(path)
        return MatchResult(np.concatenate([node.slots for node in path]), path[-1])

    def cached_slots(self, tokens: Int32Array, namespace: str = "") -> Int32Array:
        path, _, _ = find(self._root, tokens, namespace, self.page_size)
        slots: Int32Array = np.concatenate([node.slots for node in path])
        return slots[: len(tokens)]

    def look_up(self, tokens: Int32Array, namespace: str = "", earlier: Lookup | None = None) -> Lookup:
        assert earlier is None or isinstance(earlier, _StateLookup)
        kv = super().look_up(tokens, namespace, None if earlier is None else earlier.kv)
        assert isinstance(kv, RadixLookup)
        return _StateLookup(self, kv)

    def end_of_state(self, kv: RadixLookup) -> int:
        """The length of the longest prefix with a state, if the longest one with KV is that of `kv`."""
        node: RadixNode | None = kv.node
        while node is not None and (node.end > kv.length or node not in self._row_of):
            node = node.parent
        return 0 if node is None else node.end

    def match_path(self, tokens: Int32Array, namespace: str = "") -> tuple[list[RadixNode], int]:
        path, length, _ = find(self._root, tokens, namespace, self.page_size)
        while path and (path[-1].end > length or path[-1] not in self._row_of):
            path.pop()
        return path, path[-1].end if path else 0

    def evictable_match_len(self, tokens: Int32Array, namespace: str = "") -> int:
        path, _ = self.match_path(tokens, namespace)
        return sum(len(node.tokens) for node in path if not node.lock_count)

    def kv_match_len(self, tokens: Int32Array, namespace: str = "") -> int:
        """The length of the longest prefix with KV. Other requests have branched off there, or end there."""
        return find(self._root, tokens, namespace, self.page_size)[1]

    # States

    def take_row(self) -> int | None:
        """Take a row for a state that a step will save. None if no row is left."""
        if self._free_rows:
            return self._free_rows.pop()
        nodes = list(self._used if self._num_droppable_used else self._unused)
        if not nodes:
            return None
        return self._drop_state(next((node for node in nodes if not _is_retained(node)), nodes[0]))

    @property
    def num_rows_left(self) -> int:
        """The number of rows that `take_row` finds, if no other state is used meanwhile."""
        return len(self._free_rows) + len(self._unused) + self._num_droppable_used

    @property
    def _num_droppable_used(self) -> int:
        return max(len(self._used) - len(self._all_rows) // 2, 0)

    def free_row(self, row: int) -> None:
        """Free a row that was taken."""
        self._free_rows.append(row)

    def keep_state(self, node: CacheNode, row: int) -> bool:
        """A taken row has the state of the prefix that ends at `node`, or will have it before any later step.

        Returns False if the node had a state, which is the same. Then the row is free.
        """
        assert node is not self._root
        if node in self._row_of:
            self.free_row(row)
            return False
        self._row_of[node] = row
        self._unused[node] = None
        self._renew_key(node)
        return True

    def use_state(self, node: CacheNode) -> int:
        """The row of the state of a node from `match`. Counts as a use."""
        self._unused.pop(node, None)
        self._used.pop(node, None)
        self._used[node] = None
        return self._row_of[node]

    def drop_state(self, node: CacheNode, row: int) -> None:
        """Free a row, if it still has the state of a node."""
        if self._row_of.get(node) == row:
            self.free_row(self._drop_state(node))

    def _drop_state(self, node: CacheNode) -> int:
        row = self._take_state(node)
        assert row is not None
        self._renew_key(node)
        return row

    def _take_state(self, node: CacheNode) -> int | None:
        self._unused.pop(node, None)
        self._used.pop(node, None)
        return self._row_of.pop(node, None)

    def _renew_key(self, node: CacheNode) -> None:
        assert isinstance(node, RadixNode)
        if node.ticket != NO_TICKET:
            self._push(node)

    # Eviction

    def _shorten_leaf(self, leaf: RadixNode, kept: int) -> None:
        self._free_state(leaf)  # which was that after the tokens that are evicted
        super()._shorten_leaf(leaf, kept)

    def _clear_node(self, node: RadixNode) -> Int32Array:
        self._free_state(node)
        return super()._clear_node(node)

    def _free_state(self, node: RadixNode) -> None:
        row = self._take_state(node)
        if row is not None:
            self.free_row(row)

    # Checks

    @property
    def num_states(self) -> int:
        return len(self._row_of)

    @property
    def num_taken_rows(self) -> int:
        """The number of rows that requests have taken."""
        return len(self._all_rows) - len(self._free_rows) - len(self._row_of)

    def audit_slices(self) -> Iterator[Int32Array]:
        yield from super().audit_slices()
        rows = [*self._free_rows, *self._row_of.values()]
        if len(set(rows)) < len(rows) or not set(rows) <= set(self._all_rows):
            raise AssertionError("a row of saved states has two owners, or does not exist")
        if {**self._unused, **self._used}.keys() != self._row_of.keys() or self._unused.keys() & self._used.keys():
            raise AssertionError("a node with a saved state has no place in the order of eviction, or two")
        for node in self._row_of:
            if node.parent is None or not len(node.tokens):
                raise AssertionError("a node that has left the tree has a saved state")


def _is_retained(node: CacheNode) -> bool:
    assert isinstance(node, RadixNode)
    return node.num_retained > 0
