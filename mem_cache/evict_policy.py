"""Which unlocked leaf of the cache goes first.

A policy is a function from a leaf's history to a key; the smallest key is evicted first. All times are ticks
of the cache's own counter, so that a run can be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LeafHistory(Protocol):
    """What a policy may look at."""

    created: int  # tick of the insert that brought these tokens
    last_access: int  # tick of the last match or insert that went through them
    num_uses: int  # how often they were locked


EvictPolicy = Callable[[LeafHistory], tuple[int, ...]]


def lru(leaf: LeafHistory) -> tuple[int, ...]:
    """Least recently used first."""
    return (leaf.last_access,)


def lfu(leaf: LeafHistory) -> tuple[int, ...]:
    """Least often used first; among equals the least recently used."""
    return (leaf.num_uses, leaf.last_access)


def fifo(leaf: LeafHistory) -> tuple[int, ...]:
    """Oldest first, used or not."""
    return (leaf.created,)


def mru(leaf: LeafHistory) -> tuple[int, ...]:
    """Most recently used first: keeps part of a working set that is swept in a circle and does not fit."""
    return (-leaf.last_access,)


def filo(leaf: LeafHistory) -> tuple[int, ...]:
    """Newest first: keeps what came in first, such as prefixes warmed at start."""
    return (-leaf.created,)


EVICT_POLICIES: dict[str, EvictPolicy] = {"lru": lru, "lfu": lfu, "fifo": fifo, "mru": mru, "filo": filo}


def get_evict_policy(name: str) -> EvictPolicy:
    """The policy of that name. Raises ValueError that lists the names when there is none."""
    policy = EVICT_POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown eviction policy {name!r}; allowed: {', '.join(EVICT_POLICIES)}")
    return policy
