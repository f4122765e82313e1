"""Plans which states of recurrent layers are saved for the prefix cache, and which saved ones are loaded.

A request loads the state of its cached prefix into its row before its first step. A step of its prompt saves one state:

1. where the KV of other requests branches off: later requests may have the same beginning, such as a system prompt
2. otherwise, near the end of the prompt: for the same prompt again, and for the next turn of a chat
3. otherwise, at the end of its chunk: if the request loses its row, its prompt goes on there

While it decodes, its state is saved now and then, and if possible at its end. The cache gets its KV up to its newest
saved state, because no request can use the KV after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..mem_cache.base_prefix_cache import CacheNode
from ..mem_cache.recurrent_cache import RecurrentCache
from ..model_executor.step import Int32Array, StateCopies, StateSaves
from .req import Req
from .req_states import ReqStates, SavedAt, TemporaryState

if TYPE_CHECKING:  # it imports the KVCacheManager, which imports this file
    from .prefill_adder import Extend

MIN_GAIN = 64
"""A state is saved if it is so many tokens after the one before."""
TAIL = 16
"""Tokens at the end of a prompt that the next turn of a chat may not have: where the answer begins, chat templates
change them."""


class PrefixStates:
    """The states that steps save and load. Only KVCacheManager, PrefillAdder and schedule_batch call it."""

    def __init__(self, cache: RecurrentCache, *, min_gain: int = MIN_GAIN, tail: int = TAIL) -> None:
        self._cache = cache
        self._page = cache.page_size
        self._min_gain = min_gain
        self._tail = tail
        self._max_decoding = cache.num_rows_left // 2
        self._copies: list[tuple[int, int]] = []
        """Rows to copy before the next step, and their copies."""

    def admit(self, req: Req, node: CacheNode) -> None:
        """The request has got a row and the cached prefix that ends at `node`."""
        if req.kv_len:
            self._copies.append((self._cache.use_state(node), req.row))
        req.states = ReqStates(self._cache.kv_match_len(req.token_ids()[: req.reusable_len], req.namespace))

    # Saving

    def plan_saves(self, extends: Sequence[Extend], num_rows: int) -> StateSaves | None:
        """The states that an extend step of `num_rows` requests saves; None: none. `extends`: of its first requests."""
        saves = StateSaves(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32))
        for index, extend in enumerate(extends):
            row = self._take_row(extend.req, *self._save_of(extend))
            if row is not None:
                assert extend.req.states is not None
                saves.lens[index], saves.rows[index] = extend.req.states.saved_len, row
        return saves if saves.lens.any() else None

    def next_saved_len(self, req: Req) -> int:
        """The length of the next prefix of an unfinished prompt that others will find; 0: there is none."""
        return next((length for length in self._ahead(req, req.kv_len) if self._is_worth(req, length)), 0)

    @property
    def num_rows_left(self) -> int:
        """The number of states that a step can save."""
        return self._cache.num_rows_left

    def _ahead(self, req: Req, start: int) -> list[int]:
        """The lengths of prefixes of a prompt, longer than `start`, that others may have in common with it: where other
        requests branch off, and near its end."""
        assert req.states is not None
        near_end = max(req.num_tokens - self._tail, 0) // self._page * self._page
        return [length for length in (req.states.branch_len, near_end) if length > start]

    def _is_worth(self, req: Req, length: int) -> bool:
        """Whether the state after `length` tokens gains enough."""
        assert req.states is not None
        return length - max(req.locked_len, req.states.saved_len) >= self._min_gain

    def _save_of(self, extend: Extend) -> tuple[int, SavedAt]:
        """The length of the request when the step saves its state; 0: it saves none."""
        for length in self._ahead(extend.req, extend.start):
            if length <= extend.end and self._is_worth(extend.req, length):
                return length, SavedAt.PREFIX
        # A state at the end of the chunk must not take the gain of one that stays.
        ahead = self._ahead(extend.req, extend.end)
        is_apart = all(length - extend.end >= self._min_gain for length in ahead)
        return (extend.end if is_apart and not extend.is_last_chunk else 0), SavedAt.CHUNK

    def save_decoding(self, reqs: Sequence[Req], kv_lens: Int32Array) -> None:
        """Before a decode step: saves the states of requests whose KV ends with a page. `kv_lens`: of `reqs`.

        These requests take at most half of the rows, so that prefixes have the others. With pages of one token,
        `save_last` always saves the state, so there is no need.
        """
        if self._page == 1:
            return
        for index in np.flatnonzero(kv_lens % self._page == 0).tolist():
            states = reqs[index].states
            assert states is not None
            if states.row is not None or self._cache.num_taken_rows < self._max_decoding:
                self._save_now(reqs[index])

    def save_last(self, req: Req) -> None:
        """Before a request loses its row: saves its state, if its KV ends with a page. The cache has its other ones."""
        if req.kv_len % self._page == 0 and req.kv_len <= req.num_tokens:
            self._save_now(req)

    def _save_now(self, req: Req) -> None:
        row = self._take_row(req, req.kv_len, SavedAt.NEWEST)
        if row is not None:
            self._copies.append((req.row, row))

    def _take_row(self, req: Req, length: int, saved_at: SavedAt) -> int | None:
        """The row for the state after `length` tokens of a request.

        None: it gains too little, all rows are taken, or the cache takes nothing of the request any more.
        """
        states = req.states
        assert states is not None and req.node is not None
        if not self._is_worth(req, length) or self._cache.is_discarded(req.node):
            return None
        if states.row is None:
            states.row = self._cache.take_row()
        if states.row is not None:
            states.saved_len, states.saved_at = length, saved_at
        return states.row

    # Sharing

    def must_share(self, req: Req) -> bool:
        """Whether the cache must get the newest saved state before the request saves another one."""
        return req.states is not None and req.states.row is not None and req.states.saved_at is SavedAt.PREFIX

    def shareable_len(self, req: Req) -> int:
        """The tokens of a request whose KV others can use: those up to its newest saved state."""
        assert req.states is not None
        return max(req.states.saved_len, req.locked_len)

    def on_shared(self, req: Req, node: CacheNode | None) -> None:
        """The cache has got the KV of these tokens, up to `node`; None: it takes none of the request any more."""
        states = req.states
        assert states is not None
        if states.row is None:
            return
        if node is None:
            self._cache.free_row(states.row)
        else:
            if states.temporary is not None:
                self._cache.drop_state(*states.temporary)
            is_own = self._cache.keep_state(node, states.row)
            is_temporary = is_own and states.saved_at is SavedAt.CHUNK
            states.temporary = TemporaryState(node, states.row) if is_temporary else None
        states.row, states.saved_len = None, 0

    def take_copies(self) -> StateCopies | None:
        """The copies to make before the step that is built next."""
        if not self._copies:
            return None
        copies, self._copies = np.array(self._copies, np.int32), []
        return StateCopies(copies[:, 0].copy(), copies[:, 1].copy())

    def clear(self) -> None:
        """The cache is empty, and no request has a row."""
        self._copies = []

    def check_sums(self, reqs: Sequence[Req]) -> None:
        """Raises AssertionError unless each taken row is that of a request. `reqs`: all requests with a row."""
        num_taken = sum(req.states is not None and req.states.row is not None for req in reqs)
        if num_taken != self._cache.num_taken_rows:
            raise AssertionError(
                f"{self._cache.num_taken_rows} rows for saved states are taken, {num_taken} by requests"
            )
