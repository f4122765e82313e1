"""Who goes next, and how much of it: the order of the waiting queue, and one pass of admissions over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from .kv_cache_manager import KVCacheManager
from .req import Req

CLIP_MAX_NEW_TOKENS = 4096
"""A request is expected to use at most this many more tokens; else one long wish would empty the machine."""
LPM_MAX_WAITING = 128
"""Above this, matching every waiting request costs more than its order is worth."""
MAX_PASSED_OVER = 32
"""Passes in which later arrivals may go first; then a request goes before them (lpm must not starve cold prompts)."""
SHARE_LEN = 32
"""Two waiting requests with this many first tokens in common wait for one another's KV when it is not cached yet."""


class SchedulePolicy(ABC):
    """Orders the waiting queue; it decides nothing else."""

    @abstractmethod
    def order(self, waiting: Sequence[Req]) -> list[Req]:
        """All of `waiting`, best first. Equal ones keep the order of arrival."""


class FcfsPolicy(SchedulePolicy):
    """First come, first served; a retracted request keeps its place in the order of arrival."""

    def order(self, waiting: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: req.arrival)


class LpmPolicy(SchedulePolicy):
    """Longest cached prefix first, with ageing; fcfs when the queue is long."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def order(self, waiting: Sequence[Req]) -> list[Req]:
        if len(waiting) > LPM_MAX_WAITING:
            return sorted(waiting, key=lambda req: req.arrival)

        def rank(req: Req) -> tuple[bool, int, int]:
            if req.passed_over >= MAX_PASSED_OVER:
                return (False, 0, req.arrival)
            return (True, -self._kv.match_len(req), req.arrival)

        return sorted(waiting, key=rank)


def make_policy(name: str, kv: KVCacheManager) -> SchedulePolicy:
    """Raises ValueError on an unknown name."""
    if name == "fcfs":
        return FcfsPolicy()
    if name == "lpm":
        return LpmPolicy(kv)
    raise ValueError(f"schedule policy must be one of fcfs, lpm; got {name!r}")


@dataclass(frozen=True, slots=True)
class Extend:
    """A request's part of an extend step: its positions [start, end)."""

    req: Req
    start: int
    end: int

    @property
    def is_last_chunk(self) -> bool:
        return self.end == self.req.num_tokens


class PrefillAdder:
    """One pass of admissions: built with its budgets, spent, thrown away.

    `extends` is the answer. A request that does not fit into the step's tokens is cut to a page-aligned chunk; one such
    prompt is unfinished at a time, and shorter ones pass beside it. A request that does not fit into memory ends the
    pass, so that none behind it can starve it.

    Memory rule (SGLang's): a candidate needs room for its new tokens, its clipped `max_new_tokens` and a page, beside
    what running requests are expected to need (`reserved`). It is waived when the engine is otherwise empty: alone, a
    request always fits, because no longer one is ever accepted.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_tokens: int,
        chunk_size: int,
        reserved: float,
        engine_empty: bool,
    ) -> None:
        self.extends: list[Extend] = []
        self._kv = kv
        self._page = kv.page_size
        self._tokens_left = max_tokens
        self._chunk_size = chunk_size
        self._reserved = reserved
        self._engine_empty = engine_empty
        self._chunking = False
        self._first_tokens: set[tuple[str, bytes]] = set()

    def continue_chunk(self, req: Req, *, others_wait: bool) -> bool:
        """The next chunk of a prompt that was cut; it leaves half of the step to the others when there are any.

        False: there is no memory for it now.
        """
        most = min(self._chunk_size, self._tokens_left // 2 if others_wait else self._tokens_left)
        length = self._cut(req, max(most, self._page))
        if self._pages_to(req.kv_len + length) - req.kv_len > self._kv.num_available:
            return False
        self._chunking = req.kv_len + length < req.num_tokens
        self._take(req, length)
        return True

    def try_admit(self, req: Req) -> bool:
        """Admits a waiting request, whole or its first chunk. False: the pass is over, memory or rows are spent.

        True does not say that it was admitted: it may have been passed over (see `extends`).
        """
        if not self._kv.req_to_token_pool.num_free or self._tokens_left <= 0:
            return False
        match = self._kv.match(req)
        num_cached = len(match.slots)
        if num_cached <= SHARE_LEN and not self._is_first_of_its_kind(req):
            return True
        num_new = req.num_tokens - num_cached
        length = min(num_new, self._chunk_size, self._tokens_left)
        if length < num_new:
            if self._chunking:
                return True
            length -= (num_cached + length) % self._page
            if length <= 0:
                return False
        # Measured with the prefix locked: a lock makes it unevictable, and so shrinks what is available.
        self._kv.cache.lock(match.node)
        fits = self._fits(req, num_new)
        if fits:
            self._kv.admit(req, match)
        self._kv.cache.unlock(match.node)
        if not fits:
            return False
        self._chunking = self._chunking or length < num_new
        self._reserved += self._expected_growth(req) + (num_new - length)
        self._take(req, length)
        self._engine_empty = False
        return True

    def _is_first_of_its_kind(self, req: Req) -> bool:
        """Whether no request of this pass begins with the same tokens, which it could soon find in the cache."""
        if req.num_tokens <= SHARE_LEN or not self._kv.cache.shares:
            return True
        key = (req.namespace, req.token_ids()[:SHARE_LEN].tobytes())
        if key in self._first_tokens:
            return False
        self._first_tokens.add(key)
        return True

    def _fits(self, req: Req, num_new: int) -> bool:
        if self._engine_empty:
            return self._pages_to(req.num_tokens) - (req.num_tokens - num_new) <= self._kv.num_available
        free = self._kv.num_available - self._num_taken_tokens() - self._reserved
        return num_new + self._expected_growth(req) + self._page < free

    def _num_taken_tokens(self) -> int:
        """Tokens that this pass has promised but not allocated yet."""
        return sum(self._pages_to(extend.end) - extend.start for extend in self.extends)

    def _pages_to(self, num_tokens: int) -> int:
        """`num_tokens`, rounded up to whole pages."""
        return -(-num_tokens // self._page) * self._page

    @staticmethod
    def _expected_growth(req: Req) -> int:
        return min(req.num_new_left, CLIP_MAX_NEW_TOKENS)

    def _cut(self, req: Req, most: int) -> int:
        """Tokens of the next chunk: all the rest if that is at most `most`, else cut to end at a page's end."""
        rest = req.num_tokens - req.kv_len
        if rest <= most:
            return rest
        return max(most - (req.kv_len + most) % self._page, min(self._page, rest))

    def _take(self, req: Req, length: int) -> None:
        self.extends.append(Extend(req, req.kv_len, req.kv_len + length))
        self._tokens_left -= length


class NewTokenRatio:
    """Which share of their remaining `max_new_tokens` running requests are expected to use.

    SGLang's rule: starts at min(0.7 * conservativeness, 1), decays linearly over 600 decode steps to 0.14 of that, is
    set from the truth after a retraction, and starts again when the engine is idle.
    """

    _START, _FLOOR_SHARE, _DECAY_STEPS, _MARGIN_TOKENS = 0.7, 0.14, 600, 20

    def __init__(self, conservativeness: float) -> None:
        self._start = min(self._START * conservativeness, 1.0)
        self._floor = self._start * self._FLOOR_SHARE
        self._decay = (self._start - self._floor) / self._DECAY_STEPS
        self.value = self._start

    def on_decode(self) -> None:
        self.value = max(self.value - self._decay, self._floor)

    def on_retract(self, kept: Sequence[Req]) -> None:
        decoded = sum(len(req.output_ids) + self._MARGIN_TOKENS for req in kept)
        wished = sum(req.max_new_tokens for req in kept)
        self.value = min(1.0, decoded / max(wished, 1))

    def on_idle(self) -> None:
        self.value = self._start

    def reserved_by(self, running: Sequence[Req]) -> float:
        """Tokens that running requests are expected to need on top of what they hold."""
        total = 0.0
        for req in running:
            left = min(req.num_new_left, CLIP_MAX_NEW_TOKENS)
            total += left if req.sampling.ignore_eos else left * self.value
        return total


def retraction_order(running: Sequence[Req]) -> list[Req]:
    """Who gives way first: fewest output tokens, then the longest prompt, then the latest arrival."""
    return sorted(running, key=lambda req: (len(req.output_ids), -len(req.prompt_ids), -req.arrival))
