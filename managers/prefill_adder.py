"""One admission pass: it fills the next extend step with prompts and chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from .kv_cache_manager import KVCacheManager
from .req import Req
from .schedule_policy import expected_growth
from .token_gap import MIN_TOKENS, TimeBudget

MAX_SKIPPED = 128
"""A pass ends after it has skipped so many waiting requests, however long the queue is."""
SHARE_LEN = 32
"""A request skips the step if the step will add at least so many of its tokens (in whole pages) to the cache."""
CHUNK_SHARE = 3
"""A chunk has at most 1 / CHUNK_SHARE of the tokens of the prompts that end in its step, so they end hardly later."""


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
    SKIPPED = auto()
    """It gains by waiting, or it is too long to start now. Later requests may be admitted."""
    STEP_IS_FULL = auto()


class PrefillAdder:
    """One pass of admissions. It has the budgets of one step, and is used for one step only.

    Prompts that can end in the step go first: the unfinished ones and the waiting ones in the order of the policy, but
    of an unfinished and a waiting one the shorter. Beside them, the step has at most one chunk that does not end its
    prompt. It is short if others end in the step; otherwise it takes the whole step. It belongs to the unfinished
    prompt with the fewest tokens left, or to a waiting prompt that starts. A prompt starts in chunks if each unfinished
    one has a lower priority, or the same and at least twice as many tokens left. So few prompts are unfinished at a
    time, and none loses its chunk to a prompt of lower priority.

    All lengths are those that are not cached. A request that does not fit into memory ends the pass, so that no later
    request can starve it.

    All parts of a step take their pages from one budget, `num_left`: first the decodes that join the step, then the
    prompts. So a planned step always has room.

    The admission rule is SGLang's. A candidate needs room for its new tokens, its clipped `max_new_tokens` and a page,
    beside the memory that all others are expected to need, and the watermark stays free beside it. Unfinished prompts
    are expected to need all their other pages. So they never wait for each other's memory: if nothing decodes, there is
    room for all of them. The rule does not apply to an otherwise empty engine. Alone, every request fits, because
    ReqFactory refuses longer ones.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        joining: Sequence[Req],
        max_tokens: int,
        chunk_size: int,
        expected: float,
        unfinished: Sequence[Req],
        engine_empty: bool,
        time: TimeBudget | None = None,
    ) -> None:
        """`joining`: the decodes that take part in the step. `max_tokens`: prompt tokens in the step; `chunk_size`:
        prompt tokens of one request in it. `expected`: tokens to leave free: those that running requests are expected
        to need later, and the watermark. `unfinished`: prompts in chunks that continue. `time`: of the step, if running
        requests wait for it and that is bounded."""
        self.extends: list[Extend] = []
        self.refused: tuple[Req, int] | None = None
        """The request that did not fit into memory, if any, and how many tokens it needs beside its cached prefix."""
        self._kv = kv
        self._page = kv.page_size
        self._tokens_left = max_tokens
        self._chunk_size = chunk_size
        self._expected = expected
        self._engine_empty = engine_empty
        self._time = time
        self._num_charged = kv.decode_demand(joining)
        """Tokens, in whole pages, that the step will allocate."""
        self._num_ending = 0
        """Tokens of prompts that end in this step."""
        self._chunk: int | None = None
        """The place in `extends` of the chunk that does not end its prompt."""
        self._shared_soon = _SharedSoon(kv)
        self._unfinished = sorted(unfinished, key=_turn_of)
        """Those that are not in the step, highest priority and then shortest first."""
        for req in unfinished:
            self._reserve(req)
        if self._unfinished:
            self._shared_soon.announce(self._unfinished[0])

    @property
    def num_left(self) -> int:
        """The number of tokens that the step may still allocate. Negative if not even the joining decodes fit."""
        return self._kv.num_available - self._num_charged

    def num_needed(self, req: Req, num_new: int) -> int:
        """The number of tokens that must be free for a request with `num_new` tokens beside its cached prefix."""
        return num_new + expected_growth(req) + self._page

    def has_memory_for(self, num_needed: int) -> bool:
        """Whether this number of tokens is free, besides those that others are expected to need."""
        return num_needed < self.num_left - self._expected

    def fill(self, waiting: Iterable[Req], *, due: Req | None = None) -> list[Extend]:
        """Fills the step. `waiting`: best first. `due`: an unfinished prompt that gets a chunk before all others."""
        if due is not None:
            self._go_on(due, self._room(due, due.kv_len) // 2)
        self._admit(waiting)
        if self._chunk is None:
            self._end_shorter()
            self._go_on_with_rest()
        else:
            self._end_shorter(self.extends[self._chunk].req.urgency)
            self._lengthen_chunk()
        return self.extends

    # Waiting requests

    def _admit(self, waiting: Iterable[Req]) -> None:
        num_skipped = 0
        for req in waiting:
            verdict = self._try_admit(req)
            num_skipped += verdict is _Verdict.SKIPPED
            if verdict is _Verdict.STEP_IS_FULL or num_skipped == MAX_SKIPPED:
                return

    def _try_admit(self, req: Req) -> _Verdict:
        if not self._kv.req_to_token_pool.num_free or self._tokens_left <= 0:
            return _Verdict.STEP_IS_FULL
        num_cached = self._kv.device_match_len(req)
        start = self._kv.reusable_end(req, num_cached)
        num_new = req.num_tokens - start
        self._end_shorter(req.urgency, num_new)
        if self._shared_soon.has_more_of(req, num_cached):
            return _Verdict.SKIPPED
        match = self._kv.match(req)
        length = num_new
        if num_new > min(self._chunk_size, self._room(req, start)):
            if not self._may_start(req, num_new):
                return _Verdict.SKIPPED
            length = self._page  # `_lengthen_chunk` decides about the rest of the step
            if length > self._room(req, start):
                return _Verdict.STEP_IS_FULL
        with self._kv.locked(match):
            if not self._fits(req, req.num_tokens - num_cached):
                return _Verdict.STEP_IS_FULL
            self._kv.admit(req, match)
        self._reserve(req)
        self._take(req, length)
        return _Verdict.ADMITTED

    def _may_start(self, req: Req, num_new: int) -> bool:
        """Whether the one chunk of this step may be the first of this prompt."""
        if self._chunk is not None:
            return False
        return all(
            other.urgency < req.urgency or (other.urgency == req.urgency and 2 * num_new <= _rest(other))
            for other in self._unfinished
        )

    def _fits(self, req: Req, num_new: int) -> bool:
        """Whether a request fits into memory with `num_new` tokens beside its cached prefix, which is locked."""
        if self._engine_empty:
            return self._pages_to(num_new) <= self.num_left
        num_needed = self.num_needed(req, num_new)
        if self.has_memory_for(num_needed):
            return True
        self.refused = req, num_needed
        return False

    # Unfinished prompts

    def _end_shorter(self, urgency: float = -inf, num_tokens: float = inf) -> None:
        """Ends the unfinished prompts that go before one of this urgency and length, as far as the step has room.

        A prompt that is too long is skipped. So it does not delay shorter ones of lower priority.
        """
        for req in list(self._unfinished):
            if req.urgency < urgency:
                return
            rest = _rest(req)
            if rest <= min(num_tokens, self._chunk_size) and rest <= self._room(req, req.kv_len):
                self._go_on(req, rest)

    def _go_on_with_rest(self) -> None:
        """The first unfinished prompt gets the chunk of the step. Beside others it is short, or there is none."""
        if not self._unfinished:
            return
        first = self._unfinished[0]
        room = self._room(first, first.kv_len)
        if self._num_ending:
            room = min(room, self._num_ending // CHUNK_SHARE)
        if room >= self._page:
            self._go_on(first, room)

    def _go_on(self, req: Req, max_len: int) -> None:
        """Takes the next chunk of an unfinished prompt: about `max_len` tokens, and at least a page if it has one.

        Takes nothing if there is no memory for it now.
        """
        length = self._cut(req, min(max(max_len, self._page), self._chunk_size))
        if self._kv.growth(req.kv_len, req.kv_len + length) <= self.num_left:
            self._unfinished.remove(req)
            self._take(req, length)

    # The step

    def _reserve(self, req: Req) -> None:
        """Reserves memory for all new tokens of a request, which other requests leave free."""
        self._expected += self._kv.growth(req.kv_len, req.num_tokens) + expected_growth(req)

    def _take(self, req: Req, length: int) -> None:
        """Puts the next `length` tokens of a request into the step."""
        extend = Extend(req, req.kv_len, req.kv_len + length)
        if extend.is_last_chunk:
            self._num_ending += length
        else:
            assert self._chunk is None
            self._chunk = len(self.extends)
        self.extends.append(extend)
        self._shared_soon.announce(req)
        self._charge(extend)
        self._engine_empty = False

    def _charge(self, extend: Extend) -> None:
        """Takes an extend from the budgets."""
        growth = self._kv.growth(extend.start, extend.end)
        self._num_charged += growth
        self._expected -= growth
        self._tokens_left -= extend.end - extend.start
        if self._time is not None:
            self._time.take(extend.req, extend.start, extend.end)

    def _lengthen_chunk(self) -> None:
        """Lengthens the chunk of the step by what the other prompts have left of it, or to its share beside them."""
        assert self._chunk is not None
        extend = self.extends[self._chunk]
        req, start, end = extend.req, extend.start, extend.end
        max_len = end - start + self._room(req, end)
        if self._num_ending:
            max_len = min(max_len, self._num_ending // CHUNK_SHARE)
        longer = self._cut(req, min(max_len, self._chunk_size))
        if start + longer > end and self._kv.growth(end, start + longer) <= self.num_left:
            self._charge(Extend(req, end, start + longer))
            self.extends[self._chunk] = Extend(req, start, start + longer)

    def _room(self, req: Req, start: int) -> int:
        """Tokens of a prompt, from position `start` on, that the step has room and time for."""
        if self._time is None:
            return self._tokens_left
        num_left = int(min(self._time.room(req, start), self._tokens_left))
        least = max(self._page, MIN_TOKENS) - sum(extend.end - extend.start for extend in self.extends)
        return max(num_left, min(least, self._tokens_left))

    def _cut(self, req: Req, max_len: int) -> int:
        """The length of the next chunk: the whole rest if it has at most `max_len` tokens. Otherwise it ends at a page
        boundary, as it begins at one."""
        rest = _rest(req)
        return rest if rest <= max_len else max_len - max_len % self._page

    def _pages_to(self, num_tokens: int) -> int:
        """`num_tokens`, rounded up to whole pages."""
        return self._kv.growth(0, num_tokens)


def awaits_prefix(kv: KVCacheManager, req: Req, unfinished: Collection[Req]) -> bool:
    """Whether a waiting request skips the step, because an unfinished prompt goes on with its prefix."""
    if not unfinished:
        return False
    soon = _SharedSoon(kv)
    soon.announce(min(unfinished, key=_turn_of))
    return soon.has_more_of(req, kv.device_match_len(req))


class _SharedSoon:
    """Prefixes that are not in the cache yet, and will be soon. Requests that begin with one wait for it.

    Such a prefix has the cached tokens of a request and SHARE_LEN more. It is enough to compare this one length: if two
    requests have more tokens in common than are cached of one of them, then equally many are cached of both. With
    recurrent layers, it ends where a state will be saved.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._share_len = kv.growth(0, SHARE_LEN)
        self._prefixes: set[tuple[str, bytes]] = set()
        self._lens: set[int] = set()

    def announce(self, req: Req) -> None:
        """The step, or with recurrent layers one of the next steps, computes the next prefix of this request."""
        states = self._kv.states
        if states is not None and len(self._prefixes) >= states.num_rows_left:
            return
        end = req.locked_len + self._share_len if states is None else states.next_saved_len(req)
        if self._kv.cache.shares and 0 < end <= req.num_tokens:
            self._prefixes.add((req.namespace, req.token_ids()[:end].tobytes()))
            self._lens.add(end)

    def has_more_of(self, req: Req, num_cached: int) -> bool:
        """Whether a waiting request will find more than the `num_cached` tokens that the cache has of it."""
        if not self._prefixes:
            return False
        lens = [num_cached + self._share_len] if self._kv.states is None else self._lens
        tokens, longest = req.token_ids(), req.reusable_len
        return any(
            num_cached < end <= longest and (req.namespace, tokens[:end].tobytes()) in self._prefixes for end in lens
        )


def _turn_of(req: Req) -> tuple[int, int, tuple[int, int]]:
    """Orders unfinished prompts: highest priority and then shortest first."""
    return -req.urgency, _rest(req), req.place


def _rest(req: Req) -> int:
    """Tokens of an unfinished prompt that are still to be computed."""
    return req.num_tokens - req.kv_len
