"""The books of the KV pool, added up anew and independently of the code under test."""

from __future__ import annotations

import numpy as np

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.req import Req
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.radix_node import RadixNode


def cached_slots(cache: RadixCache) -> np.ndarray:
    """int32 [n]: all slots that a request could find."""
    return np.concatenate([np.empty(0, np.int32), *(node.slots for node in _nodes(cache))])


def _nodes(cache: RadixCache) -> list[RadixNode]:
    """The nodes of the tree without its root."""
    found, level = [], [cache._root]
    while level:
        level = [child for node in level for child in node.children.values()]
        found += level
    return found


def check_owners(kv: KVCacheManager, holders: list[Req]) -> None:
    """Raises AssertionError unless each slot of the pool has exactly one owner, and the counts of owners are right."""
    assert isinstance(kv.cache, RadixCache)
    page = kv.page_size
    nodes = [*_nodes(kv.cache), *kv.cache._discarded]
    cached = [node.slots for node in nodes]
    num_cached = sum(map(len, cached))
    num_locked = sum(len(node.slots) for node in nodes if node.lock_count)
    assert kv.cache.protected_size == num_locked and kv.cache.evictable_size == num_cached - num_locked
    free = kv.allocator._free
    private = [kv._table[req.row, req.locked_len : req.kv_len] for req in holders]
    pages = np.concatenate([slots[::page] // page for slots in (*cached, *private)] + list(free.slices()))
    pages.sort()
    num_pages = kv.allocator.size // page
    assert len(pages) == num_pages and (pages == np.arange(1, num_pages + 1)).all(), "a slot has no owner, or two"
    assert kv.allocator.num_free == sum(map(len, free.slices())) * page
    rows = [req.row for req in holders]
    assert 0 not in rows and len(set(rows)) == len(rows)
    assert kv.req_to_token_pool.num_free + len(rows) == kv.req_to_token_pool.num_rows
