"""Who holds which KV slot: the one place where ownership changes hands between requests, the cache and the free list.

Positions of one request, in order (docs/memory.md has the whole life):

    [0, locked_len)        the prefix cache's, locked by this request
    [locked_len, kv_len)   private to the request
    [kv_len, ...)          no slot yet

Steps run in launch order, so slots given back after a launch may serve the next one, though the device still works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from ..mem_cache.allocator import BaseAllocator
from ..mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from .req import Req

Int32Array = npt.NDArray[np.int32]


class KVCacheManager:
    """Admits, grows and releases requests. Owns the row table, the allocator and the prefix cache."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, allocator: BaseAllocator, cache: BasePrefixCache) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.cache = cache
        self.page_size = allocator.page_size
        self._table = req_to_token_pool.req_to_token

    @property
    def num_available(self) -> int:
        """Tokens that could be allocated now, evicting if need be."""
        return self.allocator.num_free + self.cache.evictable_size

    @property
    def num_used(self) -> int:
        """Tokens that no allocation can have: locked in the cache, or private."""
        return self.allocator.size - self.num_available

    # Admission

    def match_len(self, req: Req) -> int:
        """Cached tokens that an admission now would reuse; at least one token is always computed again."""
        return self.cache.match_len(req.token_ids()[:-1], req.namespace)

    def match(self, req: Req) -> MatchResult:
        return self.cache.match(req.token_ids()[:-1], req.namespace)

    def admit(self, req: Req, match: MatchResult) -> None:
        """Gives the request a row and the locked prefix. The caller has seen to a free row."""
        assert not req.row and req.in_flight == 0
        row = self.req_to_token_pool.alloc()
        assert row is not None
        self.cache.lock(match.node)
        num_cached = len(match.slots)
        self.req_to_token_pool.write(row, 0, match.slots)
        req.row = row
        req.node = match.node
        req.locked_len = req.kv_len = num_cached
        if req.cached_tokens is None:
            req.cached_tokens = min(num_cached, len(req.prompt_ids))
            req.reused_len = num_cached
        req.reused_len = min(req.reused_len, num_cached)

    # Growth

    def extend(self, reqs: Sequence[Req], ends: Int32Array) -> Int32Array | None:
        """Slots for positions [kv_len, ends[i]) of each request, evicting if need be; all or nothing.

        Returns int32 [sum(ends - kv_len)] in the order of the requests; None when there is no room.
        """
        starts = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
        rows = np.fromiter((req.row for req in reqs), np.int32, len(reqs))
        self._make_room(self.allocator.tokens_needed(starts, ends))
        slots = self.allocator.alloc_extend(starts, ends, self._last_slots(rows, starts))
        if slots is None:
            return None
        offset = 0
        for req, start, end in zip(reqs, starts.tolist(), ends.tolist(), strict=True):
            count = end - start
            self.req_to_token_pool.write_new(req.row, start, slots[offset : offset + count])
            req.kv_len = end
            offset += count
        return slots

    def decode_demand(self, reqs: Sequence[Req]) -> int:
        """Tokens, in whole pages, that one more token of each request takes from `num_available`."""
        starts = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
        return self.allocator.tokens_needed(starts, starts + 1)

    def decode_shortfall(self, reqs: Sequence[Req]) -> int:
        """Tokens that are missing for one more token of each request, even after evicting all; <= 0: they fit."""
        return self.decode_demand(reqs) - self.num_available

    def decode(self, rows: Int32Array, kv_lens: Int32Array) -> Int32Array:
        """One more slot for each row, evicting if need be; `decode_shortfall` said that they fit.

        Writes the table; the caller bumps `kv_len` of its requests. Returns int32 [B].
        """
        self._make_room(self.allocator.tokens_needed(kv_lens, kv_lens + 1))
        slots = self.allocator.alloc_decode(kv_lens + 1, self._last_slots(rows, kv_lens))
        assert slots is not None, "decode without room"
        self.req_to_token_pool.write_next(rows, kv_lens, slots)
        return slots

    def _last_slots(self, rows: Int32Array, lens: Int32Array) -> Int32Array:
        """[B] slot of position lens - 1 of each row; 0 where a row is empty."""
        slots: Int32Array = np.where(lens > 0, self._table[rows, np.maximum(lens - 1, 0)], 0).astype(np.int32)
        return slots

    def _make_room(self, num_tokens: int) -> None:
        missing = num_tokens - self.allocator.num_free
        if missing > 0:
            self.cache.evict(missing)

    # Sharing and release

    def share(self, req: Req) -> None:
        """Puts what is computed (or being computed) of a running request into the cache and locks it there."""
        assert req.node is not None
        num_tokens = min(req.kv_len, req.num_tokens)
        num_taken = self._insert(req, num_tokens)
        if num_taken <= req.locked_len:
            return
        match = self.cache.match(req.token_ids()[:num_taken], req.namespace)
        assert len(match.slots) == num_taken
        held = self._table[req.row, req.locked_len : num_taken]
        if not np.array_equal(held, match.slots[req.locked_len :]):  # the cache had some of it in slots of its own
            self.req_to_token_pool.write(req.row, req.locked_len, match.slots[req.locked_len :])
        self.cache.move_lock(req.node, match.node)
        req.node = match.node
        req.locked_len = num_taken

    def release(self, req: Req) -> None:
        """Takes everything from the request. Whole pages of what it computed stay in the cache."""
        assert req.node is not None
        num_taken = max(req.locked_len, self._insert(req, min(req.kv_len, req.num_tokens)))
        self.allocator.free(self._table[req.row, num_taken : req.kv_len])
        self.cache.unlock(req.node)
        self.req_to_token_pool.free(req.row)
        req.row = req.kv_len = req.locked_len = 0
        req.node = None

    def discard(self, req: Req) -> None:
        """Takes out of the cache what a released request has computed, and what others computed on top of that."""
        assert not req.row
        self.cache.discard(req.token_ids(), req.reused_len, req.namespace)

    def _insert(self, req: Req, num_tokens: int) -> int:
        """Offers the first `num_tokens` tokens to the cache and frees our copies of what it had. Returns how many of
        them the cache has now; 0 on top of a discarded prefix, where nothing may be offered."""
        assert req.node is not None
        if self.cache.is_discarded(req.node):
            return 0
        slots = self._table[req.row, :num_tokens]
        result = self.cache.insert(req.token_ids()[:num_tokens], slots, req.namespace)
        if result.duplicate_len > req.locked_len:
            self.allocator.free(slots[req.locked_len : result.duplicate_len])
        return result.taken_len

    # The whole pool

    def flush(self) -> None:
        """Forgets every cached prefix. Only when no request holds anything."""
        self.cache.reset()
        self.allocator.clear()
        self.req_to_token_pool.clear()

    def private_slots(self, reqs: Sequence[Req]) -> Int32Array:
        """Every slot that these requests hold for themselves."""
        held = [self._table[req.row, req.locked_len : req.kv_len] for req in reqs]
        return np.concatenate(held) if held else np.empty(0, np.int32)

    def num_private(self, reqs: Sequence[Req]) -> int:
        """Tokens (whole pages) that these requests hold for themselves."""
        page = self.page_size
        return sum(-(-req.kv_len // page) * page - req.locked_len for req in reqs)

    def check_sums(self, reqs: Sequence[Req]) -> None:
        """Raises AssertionError unless tokens and rows add up; `reqs`: all that hold a row. O(len(reqs))."""
        total = self.allocator.num_free + self.cache.evictable_size + self.cache.protected_size + self.num_private(reqs)
        size, num_rows = self.allocator.size, self.req_to_token_pool.num_rows
        if total != size:
            raise AssertionError(f"{total} tokens accounted for, of {size}")
        if self.req_to_token_pool.num_free + len(reqs) != num_rows:
            raise AssertionError(f"{self.req_to_token_pool.num_free} rows free and {len(reqs)} held, of {num_rows}")

    def audit_slices(self, reqs: Sequence[Req]) -> Iterator[None]:
        """Checks that every slot has exactly one owner; `reqs`: all that hold a row. O(pool).

        Works in slices of bounded work, a few milliseconds each, and yields after each. The slots of `reqs` are one
        slice. Nothing may change before the end. Raises AssertionError where the books are wrong.
        """
        self.check_sums(reqs)
        yield from self.allocator.audit_slices(chain(self.cache.audit_slices(), [self.private_slots(reqs)]))

    def audit(self, reqs: Sequence[Req]) -> None:
        """Runs `audit_slices` to its end."""
        for _ in self.audit_slices(reqs):
            pass
