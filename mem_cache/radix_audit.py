"""The radix cache's audit: it recomputes the cache's sizes, locks and heap from the tree, in slices of bounded work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..srt.arrays import Int32Array
from .radix_node import EMPTY, RadixNode

if TYPE_CHECKING:  # the cache imports this file
    from .radix_cache import RadixCache

_SLICE_WORK = 32768
"""Work of one slice, about 2 ms. The unit is the check of one token."""
_NODE_WORK = 256
"""Work of a visit to a tree node, in the same unit."""


def audit_slices(cache: RadixCache) -> Iterator[Int32Array]:
    """Audit `cache`, as `BasePrefixCache.audit_slices` describes."""
    audit = _RadixAudit(cache)
    yield from audit.check_tree()
    yield from audit.check_discarded()
    yield from audit.check_heap()
    audit.check_sums()


class _RadixAudit:
    """The running counts of one audit."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._num_nodes = 0
        self._num_leaves = 0
        """Leaves without locks."""
        self._num_evictable = 0
        self._num_protected = 0
        self._num_retained = 0
        # Work and slots of the current slice.
        self._work = 0
        self._slots: list[Int32Array] = []

    def check_tree(self) -> Iterator[Int32Array]:
        """Visit each node of the tree. Yields the slots found."""
        root = self._cache._root
        _check(root.parent is None and not len(root.tokens) and not root.slots.size, "the root is empty")
        path = [_Visit(root)]
        while path:
            visit = path[-1]
            key, child = next(visit.children, (b"", None))
            if child is None:
                path.pop()
                # A lock does not count on the root.
                _check(
                    visit.node is root or visit.node.lock_count >= visit.locks_below, "a lock counts on all its path"
                )
                self._check_retentions(visit.node, visit.retained_below)
            else:
                _check(child.parent is visit.node and child.key == key, "children and parents agree")
                _check(child not in self._cache._discarded, "a discarded node has left the tree")
                visit.locks_below += child.lock_count
                visit.retained_below += child.num_retained
                if visit.node is root:
                    _check(bool(child.children), "a namespace in the tree has tokens")
                    _check(not len(child.tokens) and not child.ticket, "a namespace's own node holds no tokens")
                else:
                    self._check_node(child)
                    yield from self._check_edge(child)
                if child.children:
                    path.append(_Visit(child))
                else:
                    self._check_retentions(child, 0)
            yield from self._spend(_NODE_WORK)
        yield self._end_slice()

    def check_discarded(self) -> Iterator[Int32Array]:
        """Visit the discarded nodes, which are locked and no longer in the tree. Yields the slots found."""
        root = self._cache._root
        for node in self._cache._discarded:
            _check(node.lock_count > 0, "a discarded node is locked")
            _check(node.parent is not None and not node.children, "a discarded node has a parent and no children")
            if node.parent is not root:  # not a namespace's own node
                self._num_protected += len(node.tokens)
                yield from self._check_edge(node)
            yield from self._spend(_NODE_WORK)
        yield self._end_slice()

    def check_heap(self) -> Iterator[Int32Array]:
        """Visit each entry of the heap. Yields empty arrays."""
        cache = self._cache
        _check(len(cache._heap) <= cache._max_heap_len, "the heap is bounded")
        tickets: set[int] = set()
        for key, ticket, node in cache._heap:
            if ticket == node.ticket:
                _check(ticket not in tickets, "a leaf has one live heap entry")
                _check(not node.children and not node.lock_count, "live heap entries are leaves without locks")
                tickets.add(ticket)
                _check(key == cache._policy(node), "live heap entries have the key of now")
            yield from self._spend(_NODE_WORK // 8)
        _check(len(tickets) == self._num_leaves, "the heap has one live entry for each leaf without locks")
        yield self._end_slice()

    def _check_retentions(self, node: RadixNode, num_below: int) -> None:
        num_here = len(node.retentions or ())
        _check(node.num_retained == num_here + num_below, "a retention counts on all its path")
        _check(bool(num_here) == bool(node.retained_until_s), "a node with retentions has their end")
        self._num_retained += len(node.tokens) if node.num_retained else 0

    def check_sums(self) -> None:
        cache = self._cache
        for name, counted, on_record in (
            ("evictable", self._num_evictable, cache.evictable_size),
            ("protected", self._num_protected, cache.protected_size),
            ("nodes", self._num_nodes, cache.num_nodes),
            ("retained", self._num_retained, cache.retained_size),
        ):
            _check(counted == on_record, f"{name}: {counted} in the tree, {on_record} on record")

    def _check_node(self, node: RadixNode) -> None:
        self._num_nodes += 1
        if node.lock_count:
            self._num_protected += len(node.tokens)
        else:
            self._num_evictable += len(node.tokens)
        is_evictable_leaf = not node.children and not node.lock_count
        _check(bool(node.ticket) == is_evictable_leaf, "the leaves without locks have tickets")
        self._num_leaves += is_evictable_leaf

    def _check_edge(self, node: RadixNode) -> Iterator[Int32Array]:
        page_size = self._cache.page_size
        num_tokens = len(node.tokens)
        _check(num_tokens > 0 and num_tokens % page_size == 0, "an edge is whole pages")
        _check(len(node.slots) == num_tokens, "a token has a slot")
        _check(node.key == node.tokens[:page_size].tobytes(), "the key is the first page")
        step = max(_SLICE_WORK // page_size, 1) * page_size
        for start in range(0, num_tokens, step):
            slots = node.slots[start : start + step]
            pages = slots.reshape(-1, page_size)
            _check(bool((pages[:, 0] % page_size == 0).all()), "a page's slots begin at a page")
            _check(bool((pages == pages[:, :1] + np.arange(page_size)).all()), "a page's slots are consecutive")
            self._slots.append(slots)
            yield from self._spend(len(slots))

    def _spend(self, work: int) -> Iterator[Int32Array]:
        self._work += work
        if self._work >= _SLICE_WORK:
            yield self._end_slice()

    def _end_slice(self) -> Int32Array:
        slots = np.concatenate([EMPTY, *self._slots])
        self._slots = []
        self._work = 0
        return slots


class _Visit:
    """A node on the path from the root to the current node of the audit."""

    __slots__ = ("children", "locks_below", "node", "retained_below")

    def __init__(self, node: RadixNode) -> None:
        self.node = node
        self.children = iter(node.children.items())
        self.locks_below = 0
        """Sum of the lock counts of the children visited so far."""
        self.retained_below = 0
        """Sum of their retentions."""


def _check(condition: bool, rule: str) -> None:
    # Not an assert statement: python -O removes those, and audits run there, too.
    if not condition:
        raise AssertionError(f"radix cache: violated: {rule}")
