"""The interface of prefix caches: caches that keep the KV of token prefixes for later requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ..srt.arrays import Int32Array
from ..srt.view_parts import HotPrefix


class CacheNode:
    """An opaque handle: the end of one cached prefix.

    A caller gets it from `match` and passes it to `lock` and `unlock`. A locked handle stays valid until `reset`. An
    unlocked one is valid until the next `evict` or `discard`.
    """

    __slots__ = ()


@dataclass(frozen=True)
class MatchResult:
    """The longest cached prefix. `slots`: int32 [n], n page aligned; `node`: the end of the prefix."""

    slots: Int32Array
    node: CacheNode


class Lookup(ABC):
    """The length of the longest cached prefix of some tokens. It can tell whether that may have changed."""

    __slots__ = ()
    length: int

    @abstractmethod
    def is_current(self) -> bool:
        """Whether a new look-up would certainly find the same length. It takes far less time."""


class InsertResult(NamedTuple):
    """Who owns the inserted slots after `insert`.

    [0, duplicate_len): the cache already had these tokens and keeps its own slots. The caller frees those of its
    slots that differ from the cache's. [duplicate_len, taken_len): the cache owns the caller's slots. [taken_len,
    ...): the caller still owns its slots.
    """

    duplicate_len: int
    taken_len: int
    node: CacheNode
    """The end of the first `taken_len` tokens, as `match` would return it."""


class RetentionOwner(NamedTuple):
    """Whose prefix is retained. A session has one retention, the last one. `session` "": it is not named."""

    tenant: str = ""
    session: str = ""


class BasePrefixCache(ABC):
    """Token prefixes whose KV is kept for later requests, in whole pages of `page_size` tokens.

    `evictable_size`: tokens in the cache that `evict` can free. `protected_size`: tokens in the cache that are locked.
    A namespace is part of the key: equal tokens in two namespaces never share a slot.
    """

    shares: ClassVar[bool]
    """Whether `match` can ever find an inserted prefix."""
    page_size: int
    evictable_size: int
    protected_size: int

    @abstractmethod
    def match(self, tokens: Int32Array, namespace: str = "") -> MatchResult:
        """Find the longest cached prefix of tokens: int32 [n]. Counts as an access. The cache still owns the slots."""

    def cached_slots(self, tokens: Int32Array, namespace: str = "") -> Int32Array:
        """The slots of tokens that are all in the cache: int32 [n]. May count as an access."""
        return self.match(tokens, namespace).slots

    @abstractmethod
    def look_up(self, tokens: Int32Array, namespace: str = "", earlier: Lookup | None = None) -> Lookup:
        """The number of slots that `match` would return. Has no effect on the cache; the queue is ordered by it.

        `earlier`: a result for the same tokens. The prefix that it has found is not compared again if it still ends at
        the same place.
        """

    def match_len(self, tokens: Int32Array, namespace: str = "") -> int:
        """The length of `look_up`."""
        return self.look_up(tokens, namespace).length

    @abstractmethod
    def match_path(self, tokens: Int32Array, namespace: str = "") -> tuple[Sequence[CacheNode], int]:
        """The nodes of the longest cached prefix, first part first, and its length. Has no effect on the cache.

        The last node may match only in part. So these nodes may be compared, but not locked.
        """

    @abstractmethod
    def evictable_match_len(self, tokens: Int32Array, namespace: str = "") -> int:
        """Tokens of the longest cached prefix that no request has locked. Has no effect on the cache."""

    @abstractmethod
    def insert(
        self,
        tokens: Int32Array,
        slots: Int32Array,
        namespace: str = "",
    ) -> InsertResult:
        """Offer the KV of tokens: int32 [n], stored in slots: int32 [n], to the cache. Counts as an access.

        Both arrays are copied. The caller keeps an incomplete last page.
        """

    @abstractmethod
    def lock(self, node: CacheNode, *, is_use: bool = True) -> None:
        """Protect the prefix that ends at `node` from eviction. Needs one `unlock` for each `lock`.

        `is_use`: whether the lock counts as a use of the prefix.
        """

    @abstractmethod
    def unlock(self, node: CacheNode) -> None:
        """Undo one `lock` of the same node."""

    @abstractmethod
    def freed_by_unlock(self, nodes: Iterable[CacheNode]) -> Iterator[int]:
        """Tokens that would no longer be locked after one `unlock` of each node in turn. Has no effect on the cache."""

    @abstractmethod
    def move_lock(self, held: CacheNode, node: CacheNode) -> None:
        """Replace the lock on `held` by one on `node`, where the prefix of `held` is a prefix of that of `node`.

        Visits only the nodes from `node` up to `held`. The shared part is not used again: a prompt that grows by
        chunks counts as one use.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` tokens, or all that are evictable. Returns the number of freed tokens."""

    @abstractmethod
    def discard(self, tokens: Int32Array, kept_len: int, namespace: str = "") -> None:
        """Remove the KV of tokens: int32 [n] from position `kept_len` on, and all KV that continues it.

        `kept_len` is page aligned. No later `match` finds removed KV. Unlocked KV is freed at once. Locked KV counts as
        protected and is freed with its last `unlock`.
        """

    @abstractmethod
    def is_discarded(self, node: CacheNode) -> bool:
        """Whether the prefix of this locked node was discarded. KV that continues it must then not be inserted."""

    def retain(self, tokens: Int32Array, seconds: float, owner: RetentionOwner, namespace: str = "") -> None:
        """Keep what is cached of tokens: int32 [n] for `seconds` longer than its last access would keep it.

        It can still be evicted. It takes the place of the last retention of the same session. 0 seconds only end that
        one. Of a prefix that is longer than may be retained, only the beginning is. This is no access. Only for a cache
        whose eviction policy honours retention.
        """
        raise AssertionError("this cache retains nothing")

    @property
    def num_states(self) -> int:
        """The number of saved states of recurrent layers."""
        return 0

    @property
    def retained_size(self) -> int:
        """Tokens of all prefixes that are retained. They may be locked or not.

        A retention expires at the first use of the cache after its time.
        """
        return 0

    @abstractmethod
    def hottest(self, max_prefixes: int, max_tokens: int) -> list[HotPrefix]:
        """The edges that saved the most computation, in depth-first order, each with its first `max_tokens` tokens.

        Only the default namespace is listed, so that no tenant's prompts are shown.
        """

    @abstractmethod
    def reset(self) -> None:
        """Forget all prefixes, locks and handles. The slots are not freed: the caller clears the allocator."""

    def audit(self) -> Int32Array:
        """Run `audit_slices` to its end. Returns all slots of the cache: int32 [evictable + protected]."""
        return np.concatenate([np.empty(0, dtype=np.int32), *self.audit_slices()])

    @abstractmethod
    def audit_slices(self) -> Iterator[Int32Array]:
        """Recompute the sizes, locks and structure in slices of bounded work. Yields the slots found by each slice.

        The cache must not change before the last slice. Raises AssertionError when a size, a lock or the structure is
        wrong. `BaseAllocator.audit_slices` takes the slots and checks that none is held twice.
        """
