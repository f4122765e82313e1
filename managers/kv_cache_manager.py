"""The KVCacheManager: it alone moves KV slots between requests, the prefix cache and the free list.

Positions of one request, in order (docs/memory.md has all stages of a request):

    [0, locked_len)        owned by the prefix cache, locked by this request
    [locked_len, kv_len)   private to the request
    [kv_len, ...)          no slot yet

Steps run in launch order. So slots that are freed after a launch may be given to the next step at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import numpy as np

from ..mem_cache.allocator import BaseAllocator
from ..mem_cache.base_prefix_cache import BasePrefixCache, CacheNode, InsertResult, MatchResult, RetentionOwner
from ..mem_cache.block_events import BlockEvents
from ..mem_cache.radix_cache import RadixCache
from ..mem_cache.req_to_token_pool import ReqToTokenPool
from ..srt.arrays import Int32Array
from ..srt.request_options import RequestOptions
from .kv_tiers import KVTiers
from .prefix_states import PrefixStates
from .req import Req


class KVCacheManager:
    """Admits, grows and releases requests. Owns the row table, the allocator and the prefix cache."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: BaseAllocator,
        cache: BasePrefixCache,
        tiers: KVTiers | None = None,
        states: PrefixStates | None = None,
    ) -> None:
        """`tiers`: what is below the KV pool, if anything. `states`: of recurrent layers, in the cache `cache`."""
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.cache = cache
        self.tiers = tiers
        self.states = states
        self.page_size = allocator.page_size
        self._events: BlockEvents | None = None
        self._table = req_to_token_pool.req_to_token

    @property
    def num_available(self) -> int:
        """Tokens that can be allocated now, after evictions if necessary."""
        return self.allocator.num_free + self.cache.evictable_size

    @property
    def num_used(self) -> int:
        """Tokens that cannot be allocated now: locked in the cache, or private."""
        return self.allocator.size - self.num_available

    # Admission

    def match_len(self, req: Req) -> int:
        """The number of tokens that an admission would not compute, as far as is known: those of all tiers."""
        num_cached = self.device_match_len(req)
        req.matched_len = num_cached if self.tiers is None else self.tiers.expected_end(req, num_cached)
        return req.matched_len

    def device_match_len(self, req: Req) -> int:
        """The number of tokens that the prefix cache has, without the lower tiers.

        Looks them up only if the cache has changed there, or if the request has new tokens: the queue is ordered often.
        """
        num_output = len(req.output_ids)
        known = req.lookup[0] if req.lookup is not None and req.lookup[1] == num_output else None
        if known is None or not known.is_current():
            known = self.cache.look_up(req.token_ids()[: req.reusable_len], req.namespace, known)
            req.lookup = known, num_output
        return known.length

    def match_path(self, req: Req) -> Sequence[CacheNode]:
        """The cache's nodes on the path of the prefix that an admission would reuse now."""
        path, req.matched_len = self.cache.match_path(req.token_ids()[: req.reusable_len], req.namespace)
        return path

    def evictable_match_len(self, req: Req) -> int:
        """Tokens of `device_match_len` that `num_available` counts. They are no room for the request itself."""
        return self.cache.evictable_match_len(req.token_ids()[: req.reusable_len], req.namespace)

    def match(self, req: Req) -> MatchResult:
        return self.cache.match(req.token_ids()[: req.reusable_len], req.namespace)

    def reusable_end(self, req: Req, num_cached: int) -> int:
        """Tokens that an admission would not compute: the `num_cached` tokens that the prefix cache has, and what a
        lower tier continues them with."""
        req.matched_len = num_cached if self.tiers is None else self.tiers.end_of(req, num_cached)
        return req.matched_len

    def awaits_storage(self, req: Req) -> bool:
        """Whether a waiting request should wait on, because KV of its prefix is being read from files."""
        return self.tiers is not None and self.tiers.awaits_storage(req, self.device_match_len)

    @contextmanager
    def locked(self, match: MatchResult) -> Iterator[None]:
        """Locks a matched prefix while an admission is decided. The decision is no use of the prefix.

        Inside, the prefix cannot be evicted, and `num_available` does not count it: an admission gets the rest.
        """
        self.cache.lock(match.node, is_use=False)
        try:
            yield
        finally:
            self.cache.unlock(match.node)

    def admit(self, req: Req, match: MatchResult) -> None:
        """Gives the request a row and the matched prefix, and locks the prefix. A row must be free.

        With lower tiers there must be room for all of its tokens: it gets what they have in slots of its own.
        """
        assert not req.row and req.num_steps_in_flight == 0
        row = self.req_to_token_pool.alloc()
        assert row is not None
        self.cache.lock(match.node)
        num_cached = len(match.slots)
        self.req_to_token_pool.write(row, 0, match.slots)
        req.row = row
        req.node = match.node
        req.lookup = None
        req.locked_len = req.kv_len = num_cached
        if self.tiers is not None:
            self._load(req, self.tiers)
            req.matched_len = req.kv_len
        if self.states is not None:
            self.states.admit(req, match.node)
        if req.cached_tokens is None:
            req.cached_tokens = min(req.kv_len, len(req.prompt_ids))
            req.reused_len = num_cached
        req.reused_len = min(req.reused_len, num_cached)

    def _load(self, req: Req, tiers: KVTiers) -> None:
        """Gives the request slots for the KV that lower tiers have after its matched prefix, and loads it."""
        start = req.kv_len
        slots = self.extend([req], np.array([tiers.end_of(req, start)], np.int32))
        assert slots is not None, "admitted without room"
        self.req_to_token_pool.write(req.row, start, slots)  # no step computes these positions
        tiers.admit(req, start, slots)

    # Growth

    def extend(self, reqs: Sequence[Req], ends: Int32Array) -> Int32Array | None:
        """Allocates slots for positions [kv_len, ends[i]) of each request. Evicts if necessary. All or nothing.

        Returns int32 [sum(ends - kv_len)] in the order of the requests. Returns None if there is no room.
        """
        starts = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
        rows = np.fromiter((req.row for req in reqs), np.int32, len(reqs))
        self._make_room(self.allocator.tokens_needed(starts, ends))
        slots = self.allocator.alloc_extend(starts, ends, self._last_slots(rows, starts))
        if slots is None:
            return None
        self.req_to_token_pool.write_new(rows, starts, ends - starts, slots)
        for req, end in zip(reqs, ends.tolist(), strict=True):
            req.kv_len = end
        return slots

    def growth(self, start: int, end: int) -> int:
        """Tokens, in whole pages, that a request takes from `num_available` to grow from `start` to `end` tokens."""
        page = self.page_size
        return (-(-end // page) - -(-start // page)) * page

    def decode_demand(self, reqs: Sequence[Req], num_new: int | Int32Array = 1) -> int:
        """Tokens, in whole pages, that a decode step of these requests takes from `num_available`.

        `num_new`: new tokens of each request, one number for all or int32 [len(reqs)]. Several are forced
        tokens or drafts.
        """
        if self.page_size == 1:  # then the lengths do not matter
            return len(reqs) * num_new if isinstance(num_new, int) else int(num_new.sum())
        starts = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
        return self.allocator.tokens_needed(starts, starts + num_new)

    def decode_shortfall(self, reqs: Sequence[Req], num_new: int | Int32Array = 1) -> int:
        """Tokens that are missing for a decode step of these requests, even after evicting all; <= 0: they fit."""
        return self.decode_demand(reqs, num_new) - self.num_available

    def has_room_for_decode(self, reqs: Sequence[Req]) -> bool:
        """Whether a decode step of one token for each of these requests fits, after evictions if necessary."""
        # A token takes at most one page, so only a nearly full pool needs the exact number.
        return len(reqs) * self.page_size <= self.num_available or self.decode_shortfall(reqs) <= 0

    def decode(self, rows: Int32Array, kv_lens: Int32Array) -> Int32Array:
        """Allocates one more slot for each row. Evicts if necessary. The rows must have room (`has_room_for_decode`).

        Writes the table. The caller increments `kv_len` of the requests. Returns int32 [B]. Steps with
        forced tokens or drafts use `extend`, which allocates any number of slots for each request.
        """
        if len(rows) * self.page_size > self.allocator.num_free:  # a row takes at most one page
            self._make_room(self.allocator.tokens_needed(kv_lens, kv_lens + 1))
        slots = self.allocator.alloc_decode(kv_lens + 1, self._last_slots(rows, kv_lens))
        assert slots is not None, "decode without room"
        self.req_to_token_pool.write_next(rows, kv_lens, slots)
        return slots

    def truncate(self, req: Req, kv_len: int) -> None:
        """Shortens a request to its first `kv_len` positions, and frees the pages that become empty.

        The positions after them hold KV of rejected drafts. They must be private, and no step in flight may have them.
        """
        assert req.locked_len <= kv_len <= req.kv_len
        first_empty = -(-kv_len // self.page_size) * self.page_size
        self.allocator.free(self._table[req.row, first_empty : req.kv_len])
        req.kv_len = kv_len

    def _last_slots(self, rows: Int32Array, lens: Int32Array) -> Int32Array:
        """[B], slot of position lens - 1 of each row. Any number where no page goes on: the allocator reads none."""
        if self.page_size == 1:  # no page has room after a slot, so the allocator does not ask
            return np.zeros_like(lens)
        slots: Int32Array = self._table[rows, lens - 1]
        return slots

    def _make_room(self, num_tokens: int) -> None:
        missing = num_tokens - self.allocator.num_free
        if missing > 0:
            self.cache.evict(missing)

    # Sharing and release

    def share(self, req: Req) -> None:
        """Inserts the KV of a running request into the cache, and locks it there. A step may still be computing it."""
        assert req.node is not None
        tokens = req.token_ids()[: req.kv_len]
        result = self._insert(req, tokens)
        if result is None or result.taken_len <= req.locked_len:
            return
        if result.duplicate_len > req.locked_len:
            known = self.cache.cached_slots(tokens[: result.duplicate_len], req.namespace)
            self.req_to_token_pool.write(req.row, req.locked_len, known[req.locked_len :])
        self.cache.move_lock(req.node, result.node)
        req.node = result.node
        req.locked_len = result.taken_len

    def release(self, req: Req) -> None:
        """Takes the row and all slots from the request. The cache keeps the whole pages of KV that others can use."""
        assert req.node is not None
        tokens = req.token_ids()
        if self.states is not None:
            if self.states.must_share(req):
                self.share(req)
            self.states.save_last(req)
        result = self._insert(req, tokens[: req.kv_len])
        if self.tiers is not None:  # now, so that readers of KV events know each block before those that follow it
            self.tiers.save(req, tokens, self._table[req.row])
        num_taken = req.locked_len if result is None else result.taken_len
        self.allocator.free(self._table[req.row, num_taken : req.kv_len])
        self.cache.unlock(req.node)
        self.req_to_token_pool.free(req.row)
        req.row = req.kv_len = req.locked_len = 0
        req.node = req.states = None

    def freed_by_release(self, reqs: Sequence[Req]) -> Iterator[int]:
        """Tokens by which `num_available` would grow with the release of each request in turn. Has no effect.

        KV that several of them share counts for the last one, and not at all if others share it, too.
        """
        shared = self.cache.freed_by_unlock(req.node for req in reqs if req.node is not None)
        for req, num_shared in zip(reqs, shared, strict=True):
            yield self.num_private([req]) + num_shared

    def retain(self, token_ids: Int32Array, seconds: float, options: RequestOptions) -> None:
        """Retains what the cache has of a request that has ended. `options`: of the request."""
        owner = RetentionOwner(options.tenant, options.session_id)
        self.cache.retain(token_ids, seconds, owner, options.namespace)

    def discard(self, req: Req) -> None:
        """Removes from the cache the KV that a released request has computed, and all KV that continues it."""
        assert not req.row
        self.cache.discard(req.token_ids(), req.reused_len, req.namespace)

    def _insert(self, req: Req, tokens: Int32Array) -> InsertResult | None:
        """Offers the KV of a request's first tokens to the cache, and frees the request's duplicates.

        Returns None after a discarded prefix, which nothing continues.
        """
        assert req.node is not None
        if self.cache.is_discarded(req.node):
            if self.states is not None:
                self.states.on_shared(req, None)
            return None
        if self.states is not None:
            tokens = tokens[: self.states.shareable_len(req)]
        if self._events is not None:
            self._events.session_id = req.options.session_id
        slots = self._table[req.row, : len(tokens)]
        result = self.cache.insert(tokens, slots, req.namespace)
        if result.duplicate_len > req.locked_len:
            self.allocator.free(slots[req.locked_len : result.duplicate_len])
        if self.states is not None:
            self.states.on_shared(req, result.node)
        return result

    # Lower tiers

    @property
    def has_copies(self) -> bool:
        """Whether copies between the tiers wait for a step."""
        return self.tiers is not None and self.tiers.has_copies

    def on_copied(self) -> None:
        """The oldest step with copies has ended."""
        assert self.tiers is not None
        self.tiers.on_copied()

    def wait_for_storage(self) -> None:
        """For a turn that has nothing to do: waits a moment for a read of files, if one is under way."""
        if self.tiers is not None:
            self.tiers.wait()

    # KV events

    def watch(self, events: BlockEvents) -> None:
        """From now on, `events` has what all tiers store and drop. They must be empty, but files may be there."""
        assert isinstance(self.cache, RadixCache)  # ServerArgs refuses KV events without one
        self._events = self.cache.listener = events
        events.cleared()
        if self.tiers is not None:
            self.tiers.watch(events.add)

    def report_files(self) -> None:
        """Adds some of the files that have come or gone to the events. For each turn."""
        if self.tiers is not None:
            self.tiers.report_files()

    # The whole pool

    def flush(self) -> None:
        """Empties the cache and the host's KV memory, but no files. No request may hold a row.

        KV that waits to be copied to files still gets there.
        """
        if self.tiers is not None:
            self.tiers.clear()
        if self.states is not None:
            self.states.clear()
        self.cache.reset()
        self.allocator.clear()
        self.req_to_token_pool.clear()

    def rebuild(self) -> None:
        """As `flush`, after the audit found an error: none of the KV is saved, because it may be wrong, too."""
        if self.tiers is not None:
            self.tiers.rebuild()
        self.flush()

    def private_slots(self, reqs: Sequence[Req]) -> Int32Array:
        """All private slots of these requests."""
        held = [self._table[req.row, req.locked_len : req.kv_len] for req in reqs]
        return np.concatenate(held) if held else np.empty(0, np.int32)

    def num_private(self, reqs: Sequence[Req]) -> int:
        """The number of private tokens of these requests, in whole pages."""
        page = self.page_size
        return sum(-(-req.kv_len // page) * page - req.locked_len for req in reqs)

    def check_sums(self, reqs: Sequence[Req]) -> None:
        """Raises AssertionError unless tokens and rows add up. `reqs`: all requests with a row. O(len(reqs))."""
        total = self.allocator.num_free + self.cache.evictable_size + self.cache.protected_size + self.num_private(reqs)
        size, num_rows = self.allocator.size, self.req_to_token_pool.num_rows
        if total != size:
            raise AssertionError(f"{total} tokens accounted for, of {size}")
        if self.req_to_token_pool.num_free + len(reqs) != num_rows:
            raise AssertionError(f"{self.req_to_token_pool.num_free} rows free and {len(reqs)} held, of {num_rows}")
        if self.states is not None:
            self.states.check_sums(reqs)

    def audit_slices(self, reqs: Sequence[Req]) -> Iterator[None]:
        """Checks that every slot and every host block has exactly one owner. `reqs`: all requests with a row. O(pool).

        Yields after each slice of a few milliseconds. The private slots are one slice. Nothing may change before the
        end. Raises AssertionError if a slot has no owner or two.
        """
        self.check_sums(reqs)
        if self.tiers is not None:
            self.tiers.audit()
        yield from self.allocator.audit_slices(chain(self.cache.audit_slices(), [self.private_slots(reqs)]))

    def audit(self, reqs: Sequence[Req]) -> None:
        """Runs `audit_slices` to its end."""
        for _ in self.audit_slices(reqs):
            pass
