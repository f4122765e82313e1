"""The prefix cache for `--disable-radix-cache`: it keeps nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..srt.arrays import Int32Array
from ..srt.view_parts import HotPrefix
from .base_prefix_cache import BasePrefixCache, CacheNode, InsertResult, Lookup, MatchResult


class _Nothing(Lookup):
    __slots__ = ()
    length = 0

    def is_current(self) -> bool:
        return True


class ChunkCache(BasePrefixCache):
    """A cache that never matches and never takes a slot. Every slot of a request stays private."""

    shares = False

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictable_size = 0
        self.protected_size = 0
        self._no_match = MatchResult(slots=np.empty(0, dtype=np.int32), node=CacheNode())
        self._nothing = _Nothing()

    def match(self, tokens: Int32Array, namespace: str = "") -> MatchResult:
        return self._no_match

    def look_up(self, tokens: Int32Array, namespace: str = "", earlier: Lookup | None = None) -> Lookup:
        return self._nothing

    def match_path(self, tokens: Int32Array, namespace: str = "") -> tuple[Sequence[CacheNode], int]:
        return (), 0

    def evictable_match_len(self, tokens: Int32Array, namespace: str = "") -> int:
        return 0

    def insert(
        self,
        tokens: Int32Array,
        slots: Int32Array,
        namespace: str = "",
    ) -> InsertResult:
        return InsertResult(duplicate_len=0, taken_len=0, node=self._no_match.node)

    def lock(self, node: CacheNode, *, is_use: bool = True) -> None:
        """Does nothing: there is no KV to protect."""

    def unlock(self, node: CacheNode) -> None:
        """Does nothing: there is no KV to protect."""

    def freed_by_unlock(self, nodes: Iterable[CacheNode]) -> Iterator[int]:
        return (0 for _ in nodes)

    def move_lock(self, held: CacheNode, node: CacheNode) -> None:
        """Does nothing: there is no KV to protect."""

    def evict(self, num_tokens: int) -> int:
        return 0

    def discard(self, tokens: Int32Array, kept_len: int, namespace: str = "") -> None:
        """Does nothing: there is no KV to discard."""

    def is_discarded(self, node: CacheNode) -> bool:
        return False

    def hottest(self, max_prefixes: int, max_tokens: int) -> list[HotPrefix]:
        return []

    def reset(self) -> None:
        """Does nothing: there is no KV to forget."""

    def audit_slices(self) -> Iterator[Int32Array]:
        return iter(())
