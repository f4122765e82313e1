"""A pass of admissions: it fills the next extend step with prompts and chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .kv_cache_manager import KVCacheManager
from .req import Req
from .schedule_policy import expected_growth

MAX_PASSED_BY = 128
"""A pass ends after it has rejected so many waiting requests, however long the queue is."""
SHARE_LEN = 32
"""A request skips the step if the step will add at least so many of its tokens (in whole pages) to the cache."""


@dataclass(frozen=True, slots=True)
class Extend:
    """A request's part of an extend step: its positions [start, end)."""

    req: Req
    start: int
    end: int

    @property
    def is_last_chunk(self) -> bool:
        return self.end == self.req.num_tokens


class _Verdict(Enum):
    """The decision of a pass about one waiting request."""

    ADMITTED = auto()
    PASSED_BY = auto()
    """It skips this step: it gains by waiting, or another prompt is in chunks. Later requests may be admitted."""
    STEP_IS_FULL = auto()


class PrefillAdder:
    """One pass of admissions. It has the budgets of one step, and is used for one step only.

    `extends` is the result. A request that does not fit into the step's tokens is cut to a page-aligned chunk. Only
    one prompt is unfinished at a time, and shorter ones pass beside it. A request that does not fit into memory ends
    the pass, so that no later request can starve it.

    All parts of a step take their pages from one budget, `num_left`: first the decodes that join the step, then the
    next chunk, then the admitted requests. So a planned step always has room.

    The admission rule is SGLang's. A candidate needs room for its new tokens, its clipped `max_new_tokens` and a page,
    beside the memory that all others are expected to need, and the watermark stays free beside it. The rule does not
    apply to an otherwise empty engine. Alone, every request fits, because ReqFactory refuses longer ones.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        joining: Sequence[Req],
        max_tokens: int,
        chunk_size: int,
        expected: float,
        chunked: Req | None,
        engine_empty: bool,
    ) -> None:
        """`joining`: the decodes that take part in the step. `max_tokens`: prompt tokens in the step; `chunk_size`:
        prompt tokens of one request in it. `expected`: tokens to leave free: those that
        running requests are expected to need later, and the watermark.
        `chunked`: the unfinished prompt."""
        self.extends: list[Extend] = []
        self._kv = kv
        self._page = kv.page_size
        self._tokens_left = max_tokens
        self._chunk_size = chunk_size
        self._expected = expected
        self._engine_empty = engine_empty
        self._chunked = chunked
        self._num_charged = kv.decode_demand(joining)
        """Tokens, in whole pages, that the step will allocate."""
        self._share_len = self._pages_to(SHARE_LEN)
        self._shared_soon: set[tuple[str, bytes]] = set()
        """Prefixes that are not in the cache yet, and will be after this step (`_next_prefix`)."""

    @property
    def num_left(self) -> int:
        """The number of tokens that the step may still allocate. Negative if not even the joining decodes fit."""
        return self._kv.num_available - self._num_charged

    def continue_chunk(self, *, others_wait: bool) -> bool:
        """Takes the next chunk of the unfinished prompt. If others wait, the chunk leaves them half of the step.

        Returns False if there is no memory for the chunk now.
        """
        req = self._chunked
        assert req is not None
        max_len = min(self._chunk_size, self._tokens_left // 2 if others_wait else self._tokens_left)
        length = self._cut(req, max(max_len, self._page))
        if self._growth(req.kv_len, req.kv_len + length) > self.num_left:
            return False
        self._chunked = None
        self._take(req, length)
        return True

    def admit(self, waiting: Iterable[Req]) -> None:
        """Admits requests of `waiting`, best first, until the step is full: whole prompts, or a first chunk."""
        num_passed_by = 0
        for req in waiting:
            verdict = self._try_admit(req)
            num_passed_by += verdict is _Verdict.PASSED_BY
            if verdict is _Verdict.STEP_IS_FULL or num_passed_by == MAX_PASSED_BY:
                return

    def _try_admit(self, req: Req) -> _Verdict:
        if not self._kv.req_to_token_pool.num_free or self._tokens_left <= 0:
            return _Verdict.STEP_IS_FULL
        match = self._kv.match(req)
        num_cached = len(match.slots)
        if self._next_prefix(req, num_cached, req.reusable_len) in self._shared_soon:
            return _Verdict.PASSED_BY
        start = self._kv.reusable_end(req, match)
        num_computed = req.num_tokens - start
        length = min(num_computed, self._chunk_size, self._tokens_left)
        if length < num_computed:
            if self._chunked is not None:
                return _Verdict.PASSED_BY
            length -= (start + length) % self._page
            if length <= 0:
                return _Verdict.STEP_IS_FULL
        with self._kv.locked(match):
            if not self._fits(req, req.num_tokens - num_cached):
                return _Verdict.STEP_IS_FULL
            self._kv.admit(req, match)
        self._take(req, length)
        return _Verdict.ADMITTED

    def _fits(self, req: Req, num_new: int) -> bool:
        """Whether a request fits into memory with `num_new` tokens beside its cached prefix, which is locked."""
        if self._engine_empty:
            return self._pages_to(num_new) <= self.num_left
        return num_new + expected_growth(req) + self._page < self.num_left - self._expected

    def _take(self, req: Req, length: int) -> None:
        """Puts the next `length` tokens of a request into the step, and charges the budgets with them."""
        extend = Extend(req, req.kv_len, req.kv_len + length)
        self.extends.append(extend)
        self._tokens_left -= length
        self._num_charged += self._growth(extend.start, extend.end)
        self._expected += expected_growth(req) + req.num_tokens - extend.end
        self._engine_empty = False
        if not extend.is_last_chunk:
            assert self._chunked is None
            self._chunked = req
        prefix = self._next_prefix(req, req.locked_len, extend.end)
        if prefix is not None:
            self._shared_soon.add(prefix)

    def _next_prefix(self, req: Req, num_cached: int, num_tokens: int) -> tuple[str, bytes] | None:
        """The shortest prefix that is worth waiting a step for: the cached tokens and SHARE_LEN more.

        None if it is longer than `num_tokens`. If two requests of a pass have the same prefix, the second one finds
        it in the cache after the first one's step. It is enough to compare this one length: if two requests have more
        tokens in common than are cached of one of them, then equally many are cached of both.
        """
        end = num_cached + self._share_len
        if end > num_tokens or not self._kv.cache.shares:
            return None
        return req.namespace, req.token_ids()[:end].tobytes()

    def _cut(self, req: Req, max_len: int) -> int:
        """The length of the next chunk: the whole rest if it has at most `max_len` tokens. Otherwise it ends at a page
        boundary."""
        rest = req.num_tokens - req.kv_len
        if rest <= max_len:
            return rest
        return max(max_len - (req.kv_len + max_len) % self._page, min(self._page, rest))

    def _growth(self, start: int, end: int) -> int:
        """The number of tokens, in whole pages, that a request allocates to grow from `start` to `end`."""
        return self._pages_to(end) - self._pages_to(start)

    def _pages_to(self, num_tokens: int) -> int:
        """`num_tokens`, rounded up to whole pages."""
        return -(-num_tokens // self._page) * self._page
