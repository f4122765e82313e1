"""Whether the cache retains what requests have asked for, and no more. The reference is what clients send and hear."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from random_steps.books import nodes_of

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.mem_cache.base_prefix_cache import RetentionOwner
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.radix_node import RadixNode
from tercet.mem_cache.retention import Retention
from tercet.srt.arrays import Int32Array
from tercet.srt.io_struct import pack_ids
from tercet.srt.request_options import RequestOptions


class Wish(NamedTuple):
    """One call of `retain`. `token_ids`: of `pack_ids`."""

    token_ids: bytes
    seconds: float
    namespace: str
    owner: RetentionOwner


class RetentionBooks:
    """The retentions of one engine."""

    def __init__(self, kv: KVCacheManager, max_retained_share: float, clock: Callable[[], float]) -> None:
        """`kv`: its cache honours retention."""
        assert isinstance(kv.cache, RadixCache) and kv.cache.retentions is not None
        self._cache = kv.cache
        self._retentions = kv.cache.retentions
        self._max_tokens = int(max_retained_share * kv.allocator.size)
        self._clock = clock
        self._wanted: list[Wish] = []
        self._done: list[Wish] = []
        """Those of this turn, in order."""
        self._until: defaultdict[tuple[str, str, float], list[bytes]] = defaultdict(list)
        """The token ids of all wishes by namespace, tenant and end."""
        self._last: dict[tuple[str, RetentionOwner], float] = {}
        """When the last retention of each session ends."""
        self._retain = kv.retain
        kv.retain = self._checked_retain  # type: ignore[method-assign]

    @property
    def is_full(self) -> bool:
        """Whether not one more page may be retained."""
        return self._cache.retained_size > self._max_tokens - self._cache.page_size

    def expect(self, token_ids: list[int], seconds: float, options: RequestOptions) -> None:
        """This turn retains these tokens. Called in the order in which it does."""
        owner = RetentionOwner(options.tenant, options.session_id)
        self._wanted.append(Wish(pack_ids(token_ids), seconds, options.namespace, owner))

    def _checked_retain(self, token_ids: Int32Array, seconds: float, options: RequestOptions) -> None:
        self._retain(token_ids, seconds, options)
        owner = RetentionOwner(options.tenant, options.session_id)
        wish = Wish(token_ids.tobytes(), seconds, options.namespace, owner)
        self._done.append(wish)
        end_s = self._clock() + seconds
        if owner.session:
            self._last[wish.namespace, owner] = end_s
        if seconds <= 0:
            return
        self._until[wish.namespace, owner.tenant, end_s].append(wish.token_ids)
        found = [one for node in nodes_of(self._cache) for one in node.retentions or () if one.end_s == end_s]
        if not any(self._is_of(one, wish) for one in found):
            assert self.is_full or not self._cache.match_len(token_ids, wish.namespace), "a prefix is not retained"

    @staticmethod
    def _is_of(retention: Retention, wish: Wish) -> bool:
        assert retention.node is not None
        namespace, token_ids = _prefix(retention.node)
        same_owner = (namespace, retention.tenant) == (wish.namespace, wish.owner.tenant)
        return same_owner and wish.token_ids.startswith(token_ids)

    def check(self, num_told: int) -> None:
        """After a turn. `num_told`: the retained tokens that the scheduler tells."""
        wanted, done, self._wanted, self._done = self._wanted, self._done, [], []
        assert done == wanted, "other prefixes were retained than requests have asked for"
        retained: set[RadixNode] = set()
        retentions: list[Retention] = []
        tenants: Counter[str] = Counter()
        for node in reversed(nodes_of(self._cache)):  # children before their parents
            if node.retentions:
                retained.add(node)
                self._check_node(node, [*node.retentions])
                retentions += node.retentions
                for one in node.retentions:
                    assert one.node is node, "a retention does not know where it is"
                    tenants[one.tenant] += node.end
            if node in retained and node.parent is not None:
                retained.add(node.parent)
        num_tokens = sum(len(node.tokens) for node in retained)
        assert num_told == self._cache.retained_size == num_tokens, f"{num_tokens} tokens are retained, not {num_told}"
        assert num_tokens <= self._max_tokens, f"{num_tokens} tokens are retained, more than {self._max_tokens}"
        assert len(retentions) == self._retentions.num_live
        counted = {name: tenant.num_tokens for name, tenant in self._retentions._tenants.items()}
        assert counted == tenants, f"tenants retain {tenants} tokens, and {counted} are counted"
        sessions = [one.key for one in retentions if one.key is not None]
        assert len(set(sessions)) == len(sessions), "a session has two retentions"

    def _check_node(self, node: RadixNode, retentions: list[Retention]) -> None:
        namespace, token_ids = _prefix(node)
        for one in retentions:
            wished = self._until[namespace, one.tenant, one.end_s]
            assert any(other.startswith(token_ids) for other in wished), "nobody has asked to retain this prefix"
            assert one.key is None or self._last[one.key] == one.end_s, "a session retains an earlier turn"


def _prefix(node: RadixNode) -> tuple[str, bytes]:
    """The namespace and the token ids of the prefix that ends at a node."""
    parts: list[np.ndarray] = []
    while node.parent is not None and node.parent.parent is not None:
        parts.append(node.tokens)
        node = node.parent
    return node.key.decode(), np.concatenate([np.empty(0, np.int32), *reversed(parts)]).tobytes()
