"""Radix caches with contents, without requests."""

from __future__ import annotations

import numpy as np

from tercet.mem_cache.allocator import BaseAllocator, make_allocator
from tercet.mem_cache.radix_cache import RadixCache


def i32(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make(page_size: int = 1, size: int = 256, policy: str = "lru") -> tuple[RadixCache, BaseAllocator]:
    allocator = make_allocator(size, page_size)
    return RadixCache(allocator, page_size, policy), allocator


def put(cache: RadixCache, allocator: BaseAllocator, tokens: object, namespace: str = "") -> np.ndarray:
    """Insert tokens under fresh slots and give back what the cache did not take, as a request does at its end."""
    tokens = i32(tokens)
    slots = allocator.alloc_extend(i32([0]), i32([len(tokens)]), i32([0]))
    assert slots is not None
    duplicate_len, taken_len, _ = cache.insert(tokens, slots, namespace)
    allocator.free(slots[:duplicate_len])
    allocator.free(slots[taken_len:])
    return slots


def check(cache: RadixCache, allocator: BaseAllocator) -> None:
    held = cache.audit()
    allocator.audit(held)
    assert len(held) == cache.evictable_size + cache.protected_size == allocator.size - allocator.num_free
