"""Eviction policies: which unlocked leaf of the radix cache is evicted first.

A policy maps a leaf's history to a key. The leaf with the smallest key is evicted first. Times are ticks of the
cache's own counter, not of a clock, so a run can be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LeafHistory(Protocol):
    """The facts about a leaf that a policy may use."""

    created: int  # tick of the insert of these tokens
    last_access: int  # tick of the last match or insert of these tokens
    num_uses: int  # number of locks so far that count as a use


EvictPolicy = Callable[[LeafHistory], tuple[int, ...]]


def lru(leaf: LeafHistory) -> tuple[int, ...]:
    """Least recently used first."""
    return (leaf.last_access,)


def lfu(leaf: LeafHistory) -> tuple[int, ...]:
    """Least frequently used first, then least recently used."""
    return (leaf.num_uses, leaf.last_access)


def fifo(leaf: LeafHistory) -> tuple[int, ...]:
    """Oldest first, however recently it was used."""
    return (leaf.created,)


def mru(leaf: LeafHistory) -> tuple[int, ...]:
    """Most recently used first. Keeps part of a working set that is read in a circle and does not fit."""
    return (-leaf.last_access,)


def filo(leaf: LeafHistory) -> tuple[int, ...]:
    """Newest first. Keeps the first prefixes, such as those that were warmed at the start."""
    return (-leaf.created,)


EVICT_POLICIES: dict[str, EvictPolicy] = {"lru": lru, "lfu": lfu, "fifo": fifo, "mru": mru, "filo": filo}


def get_evict_policy(name: str) -> EvictPolicy:
    """The policy called `name`. Raises ValueError with a list of the names for an unknown one."""
    policy = EVICT_POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown eviction policy {name!r}; allowed: {', '.join(EVICT_POLICIES)}")
    return policy
