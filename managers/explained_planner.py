"""`--explain-schedule`: logs for each request that waited long which limits and which requests it waited for.

A request that ends while it waits is explained, too: it may have waited longer than all others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import islice
from typing import NamedTuple

from ..srt import log
from ..srt.io_struct import AbortFinish
from .kv_cache_manager import KVCacheManager
from .planner import PlanLimits, Planner
from .proposer import Proposer
from .req import Req, Stage
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)

MAX_NAMES = 8
"""Requests that a line of the log names."""
_MAX_ADMISSIONS = 4096
"""Admissions that are remembered. A request that waited for more was behind at least so many."""


class Limit(Enum):
    """What keeps the first request of the waiting queue from starting."""

    RUNNING = "max_running_requests"
    MEMORY = "kv_memory"
    STEP = "max_prefill_tokens"
    """The steps are full of prompts of other requests."""
    DECODES = "decode_steps"
    """Running requests get their tokens first."""
    GRAMMAR = "grammar"
    """Its grammar is being compiled."""
    FILES = "kv_files"
    """KV of its prefix is being read from files."""
    PAUSE = "pause"
    """Generation is paused."""


class _Admission(NamedTuple):
    number: int
    rid: str
    num_tokens: int
    """Tokens to compute."""


class _Arrival(NamedTuple):
    """The counts at the time when a request entered the queue, also by a retraction."""

    at_s: float
    num_admitted: int
    limit_s: dict[Limit, float]


class ExplainedPlanner(Planner):
    """A Planner that logs why requests waited. It does not change the plans."""

    def __init__(
        self,
        limits: PlanLimits,
        kv: KVCacheManager,
        queues: RequestQueues,
        proposer: Proposer | None = None,
        *,
        clock: Callable[[], float],
        slow_s: float,
    ) -> None:
        """`slow_s`: the shortest wait that is explained. The others: see Planner."""
        super().__init__(limits, kv, queues, proposer, clock=clock)
        self._slow_s = slow_s
        self._clock = clock
        self._new: dict[Req, None] = {}
        """Requests that have entered the waiting queue since the last plan."""
        self._arrivals: dict[Req, _Arrival] = {}
        """Of the other requests in the waiting queue."""
        self._admissions: deque[_Admission] = deque(maxlen=_MAX_ADMISSIONS)
        self._num_admitted = 0
        self._limit_s = dict.fromkeys(Limit, 0.0)
        """Seconds for which each limit held the first request, since the start."""
        self._limit: Limit | None = None
        self._last_s = clock()
        queues.on_wait.append(self._on_wait)
        queues.on_end.append(self._on_end)

    def plan(self) -> ScheduleBatch | None:
        now = self._count_time()
        batch = super().plan()
        if batch is not None and batch.num_prompt_tokens:
            self._note_admissions(batch, now)
        self._limit = self._find_limit(batch)
        return batch

    def on_pause(self) -> None:
        super().on_pause()
        self._count_time()
        self._limit = Limit.PAUSE

    def _on_wait(self, req: Req) -> None:
        self._new[req] = None

    def _on_end(self, req: Req) -> None:
        if req.stage is Stage.WAITING:
            arrival, now = self._arrivals.pop(req, None) or self._arrival_of(req), self._clock()
            self._new.pop(req, None)
            if now - arrival.at_s >= self._slow_s:
                self._explain(req, arrival, now)

    def _count_time(self) -> float:
        """Adds the time since the last call to the limit of that time. Returns the time now."""
        self._note_arrivals()
        now = self._clock()
        if self._limit is not None:
            self._limit_s[self._limit] += now - self._last_s
        self._last_s = now
        return now

    def _note_arrivals(self) -> None:
        for req in self._new:
            self._arrivals[req] = self._arrival_of(req)
        self._new.clear()

    def _arrival_of(self, req: Req) -> _Arrival:
        """Of a request that has entered the queue since the last call of `_note_arrivals`."""
        # A request in the queue that has had a row here lost it in the last plan. Retractions may be of an engine that
        # has died.
        at_s = req.arrived_s if req.queue_time_s is None else self._last_s
        return _Arrival(at_s, self._num_admitted, self._limits_until(at_s))

    def _limits_until(self, time_s: float) -> dict[Limit, float]:
        """Seconds of each limit from the start until a time, which is not before that of the last count."""
        limit_s = dict(self._limit_s)
        if self._limit is not None:
            limit_s[self._limit] += max(time_s - self._last_s, 0.0)
        return limit_s

    def _note_admissions(self, batch: ScheduleBatch, now: float) -> None:
        new_rows = {new.row for new in batch.inputs.new_rows}
        admitted = [req for req in batch.reqs if req.row in new_rows]
        for req in admitted:
            arrival = self._arrivals.pop(req, None)  # None: it was preempted in this plan
            self._new.pop(req, None)
            if arrival is not None and now - arrival.at_s >= self._slow_s:
                self._explain(req, arrival, now)
        for req in admitted:
            self._admissions.append(_Admission(self._num_admitted, req.rid, req.num_tokens - req.matched_len))
            self._num_admitted += 1

    def _explain(self, req: Req, arrival: _Arrival, now: float) -> None:
        before = [one for one in self._admissions if one.number >= arrival.num_admitted]
        heaviest = sorted(before, key=lambda one: -one.num_tokens)
        waits = {limit: seconds - arrival.limit_s[limit] for limit, seconds in self._limits_until(now).items()}
        holders = sorted((one for one in self.queues.holders() if one is not req), key=lambda one: -one.kv_len)
        fields = {
            "sample": req.rid,
            "queue_s": round(now - arrival.at_s, 3),
            "num_retractions": req.num_retractions,
            "ended": _end_of(req),
            "limits_s": {limit.value: round(seconds, 3) for limit, seconds in waits.items() if seconds > 0},
            "num_admitted_before": self._num_admitted - arrival.num_admitted,
            "tokens_admitted_before": sum(one.num_tokens for one in before),
            "most_tokens_before": [one.rid for one in islice(heaviest, MAX_NAMES)],
            "most_kv_now": [one.rid for one in islice(holders, MAX_NAMES)],
        }
        log.event(logger, logging.INFO, "Waited", fields)

    def _find_limit(self, batch: ScheduleBatch | None) -> Limit | None:
        """The limit that keeps the first waiting request from starting until the next plan. None: no request waits."""
        waiting = self.queues.waiting
        if not waiting:
            return None
        first = next((req for req in waiting if not req.awaits_grammar), None)
        if first is None:
            return Limit.GRAMMAR
        if first.tiers is not None and first.tiers.awaits_files:
            return Limit.FILES
        if not self.kv.req_to_token_pool.num_free:
            return Limit.RUNNING
        if not self._has_memory_for(first):
            return Limit.MEMORY
        return Limit.STEP if batch is not None and batch.num_prompt_tokens else Limit.DECODES

    def _has_memory_for(self, req: Req) -> bool:
        """Whether an admission after the planned step would have room for a waiting request."""
        adder = self._make_adder([], None)
        needed = adder.num_needed(req, req.num_tokens - self.kv.device_match_len(req))
        return adder.has_memory_for(needed + self.kv.evictable_match_len(req))


def _end_of(req: Req) -> str | None:
    """Why a request has ended while it waited; None: it has started."""
    return req.finish.message if isinstance(req.finish, AbortFinish) else None
