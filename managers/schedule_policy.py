"""The order of the waiting queue, the memory that running requests are expected to need, and who gives way first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from .kv_cache_manager import KVCacheManager
from .req import Req

CLIP_MAX_NEW_TOKENS = 4096
"""A request is expected to use at most this many more tokens; else one long wish would empty the machine."""
LPM_MAX_WAITING = 128
"""Above this, matching every waiting request costs more than its order is worth."""
MAX_PASSED_OVER = 32
"""Passes in which later arrivals may go first; then a request goes before them (lpm must not starve cold prompts)."""


class SchedulePolicy(ABC):
    """Orders the waiting queue; it decides nothing else. `waiting` is always in the order of arrival."""

    @abstractmethod
    def order(self, waiting: Collection[Req]) -> Iterable[Req]:
        """All of `waiting`, best first; equal ones keep the order of arrival."""

    @abstractmethod
    def on_admitted(self, admitted: Sequence[Req], waiting: Iterable[Req]) -> None:
        """A pass has admitted these; `waiting` still wait. A policy that ages requests counts here."""


class FcfsPolicy(SchedulePolicy):
    """First come, first served; a retracted request keeps its place in the order of arrival."""

    def order(self, waiting: Collection[Req]) -> Iterable[Req]:
        return waiting

    def on_admitted(self, admitted: Sequence[Req], waiting: Iterable[Req]) -> None:
        """Nobody is passed over because of this order, so there is nothing to count."""


class LpmPolicy(SchedulePolicy):
    """Longest cached prefix first, with ageing; fcfs when the queue is long."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def order(self, waiting: Collection[Req]) -> Iterable[Req]:
        return waiting if len(waiting) > LPM_MAX_WAITING else sorted(waiting, key=self._rank)

    def on_admitted(self, admitted: Sequence[Req], waiting: Iterable[Req]) -> None:
        """Ages those who wait although a later arrival was admitted."""
        latest = max((req.arrival for req in admitted), default=-1)
        for req in waiting:
            if req.arrival > latest:
                return
            req.passed_over += 1

    def _rank(self, req: Req) -> tuple[bool, int]:
        if req.passed_over >= MAX_PASSED_OVER:
            return (False, 0)
        return (True, -self._kv.match_len(req))


def make_policy(name: str, kv: KVCacheManager) -> SchedulePolicy:
    """Raises ValueError on an unknown name."""
    if name == "fcfs":
        return FcfsPolicy()
    if name == "lpm":
        return LpmPolicy(kv)
    raise ValueError(f"schedule policy must be one of fcfs, lpm; got {name!r}")


def expected_growth(req: Req) -> int:
    """Tokens that a request may still generate, clipped."""
    return min(req.num_new_left, CLIP_MAX_NEW_TOKENS)


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

    def reserved_by(self, running: Iterable[Req]) -> float:
        """Tokens that running requests are expected to need on top of what they hold."""
        total = 0.0
        for req in running:
            left = expected_growth(req)
            total += left if req.sampling.ignore_eos else left * self.value
        return total


def retraction_order(running: Sequence[Req]) -> list[Req]:
    """Who gives way first: fewest output tokens, then the longest prompt, then the latest arrival."""
    return sorted(running, key=lambda req: (len(req.output_ids), -len(req.prompt_ids), -req.arrival))
