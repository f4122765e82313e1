"""What the scheduler may ask of a cache of KV prefixes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt


class CacheNode:
    """A place in the cache, opaque to its users: the end of one cached prefix.

    Kept from `match` to be locked, and from `lock` to be unlocked. While locked it stays valid whatever
    happens in the cache; unlocked, only until the next call of `evict` or `discard`.
    """

    __slots__ = ()


@dataclass(frozen=True)
class MatchResult:
    """`slots`: int32 [n], slots of the first n tokens, n page aligned; `node`: where that prefix ends."""

    slots: npt.NDArray[np.int32]
    node: CacheNode


class InsertResult(NamedTuple):
    """Who owns which of the inserted slots now.

    [0, duplicate_len): the cache had these tokens and keeps its own slots. Where the caller's slots are
    others, they are still the caller's, who must free them. [duplicate_len, taken_len): the cache's now.
    [taken_len, ...): the caller's.
    """

    duplicate_len: int
    taken_len: int


class BasePrefixCache(ABC):
    """Token prefixes whose KV is kept for requests to come, in whole pages of `page_size` tokens.

    `evictable_size`, `protected_size`: tokens held by the cache that `evict` could free, and that locks hold
    back. A namespace is part of the key: equal tokens in two namespaces never share a slot.
    """

    shares: ClassVar[bool]
    """Whether anything that is inserted can ever be matched."""
    page_size: int
    evictable_size: int
    protected_size: int

    @abstractmethod
    def match(self, tokens: npt.NDArray[np.int32], namespace: str = "") -> MatchResult:
        """The longest cached prefix of tokens: int32 [n]; counts as an access. Its slots stay the cache's."""

    @abstractmethod
    def match_len(self, tokens: npt.NDArray[np.int32], namespace: str = "") -> int:
        """How many slots `match` would return, with no effect on the cache: to order a queue by."""

    @abstractmethod
    def insert(
        self,
        tokens: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        namespace: str = "",
        priority: int = 0,
    ) -> InsertResult:
        """Offer the KV of tokens: int32 [n], which lies in slots: int32 [n]; counts as an access.

        Both arrays are copied. A ragged last page is left with the caller. Of two leaves, that of lower
        priority is evicted first; tokens keep the highest priority that they were ever inserted with.
        """

    @abstractmethod
    def evictable_len(self, node: CacheNode) -> int:
        """Tokens that `lock(node)` would take from `evictable_size`; with no effect on the cache."""

    @abstractmethod
    def lock(self, node: CacheNode) -> None:
        """Keep the prefix that ends at `node` from eviction until it is unlocked as often; a use of it."""

    @abstractmethod
    def unlock(self, node: CacheNode) -> None:
        """Undo one `lock` of the same node."""

    @abstractmethod
    def move_lock(self, held: CacheNode, node: CacheNode) -> None:
        """`lock(node)` and `unlock(held)` in one, where `held` ends a prefix of what `node` ends.

        Walks only from `node` up to `held`, and is no new use of the shared part: a prompt that grows chunk
        by chunk counts once.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` tokens into the allocator, or all it can. Returns how many."""

    @abstractmethod
    def discard(self, tokens: npt.NDArray[np.int32], kept_len: int, namespace: str = "") -> None:
        """Take the KV of tokens: int32 [n] out of the cache, but for the first `kept_len`, and all KV that was computed
        on top of it. `kept_len` is page aligned.

        No later `match` finds it. What is unlocked is freed now, and what is locked when its last lock goes; until then
        it counts as protected.
        """

    @abstractmethod
    def is_discarded(self, node: CacheNode) -> bool:
        """Whether the prefix that ends at this locked node was discarded: KV on top of it must not be inserted."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, locks and handles too. Slots are not freed: the caller clears the allocator."""

    def audit(self) -> npt.NDArray[np.int32]:
        """Runs `audit_slices` to its end; every slot that the cache holds: int32 [evictable + protected]."""
        return np.concatenate([np.empty(0, dtype=np.int32), *self.audit_slices()])

    @abstractmethod
    def audit_slices(self) -> Iterator[npt.NDArray[np.int32]]:
        """Recomputes everything in slices of bounded work; yields the slots that each slice found the cache to hold.

        The cache must not change before the end. Raises AssertionError where sizes, locks or structure are wrong. That
        no slot is held twice is for `BaseAllocator.audit_slices` to check, which takes what this yields.
        """
