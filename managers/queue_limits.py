"""The limits of the waiting queue: how many requests wait, and how long a new one would wait.

The wait is estimated when a request arrives: the tokens that requests ahead of it have to compute, divided by the rate
at which such tokens left the queue in the last seconds. The rate is measured only while requests wait, so it includes
everything that they wait for: prefill, decode steps between, free rows and free memory. The queue decides which
requests are ahead, and which one is displaced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..srt.errors import MAX_RETRY_AFTER_S, QueueFull
from .kv_cache_manager import KVCacheManager
from .req import Req
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch

_WINDOW_S = 10.0
"""The rate is that of the last `_WINDOW_S` seconds in which requests waited, and of at least `_MIN_KEPT` drains."""
_MIN_KEPT = 8
_MAX_KEPT = 1024
_MAX_AGE_S = 60.0
"""Older drains tell nothing about the present."""
_MIN_MEASURED = 4
"""With fewer drains there is no rate, and no request is refused for its estimated wait."""


class _Drain(NamedTuple):
    """Tokens that left the queue together, after requests had waited for `duration_s` since the drain before."""

    end_s: float
    duration_s: float
    num_tokens: int


class DrainRate:
    """Tokens per second that leave the waiting queue while requests wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds from any start."""
        self._clock = clock
        self._drains: deque[_Drain] = deque()
        self._num_tokens = 0
        self._duration_s = 0.0
        self._waiting_since: float | None = None
        """The time of the last drain, if it left requests waiting."""

    def add(self, num_tokens: int, *, others_wait: bool) -> None:
        """`num_tokens` have left the queue. `others_wait`: not all have."""
        now = self._clock()
        if self._waiting_since is not None:
            self._drains.append(_Drain(now, now - self._waiting_since, num_tokens))
            self._num_tokens += num_tokens
            self._duration_s += now - self._waiting_since
            while len(self._drains) > _MIN_KEPT and (
                self._duration_s - self._drains[0].duration_s >= _WINDOW_S or len(self._drains) > _MAX_KEPT
            ):
                self._drop_oldest()
        self._waiting_since = now if others_wait else None

    def stop(self) -> None:
        """The queue is empty, or generation is paused: the time until the next drain is not measured."""
        self._waiting_since = None

    @property
    def tokens_per_s(self) -> float | None:
        """None: too little was measured lately."""
        now = self._clock()
        while self._drains and now - self._drains[0].end_s > _MAX_AGE_S:
            self._drop_oldest()
        if len(self._drains) < _MIN_MEASURED or self._num_tokens <= 0:
            return None
        undrained_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        return self._num_tokens / max(self._duration_s + undrained_s, 1e-9)

    def _drop_oldest(self) -> None:
        oldest = self._drains.popleft()
        self._num_tokens -= oldest.num_tokens
        self._duration_s -= oldest.duration_s


class QueueLimits:
    """Refuses new requests for which the queue has no place, or which would wait too long.

    Each refusal says when to try again: when the queue will have a place, counting the clients that were refused
    before. So refused clients do not return at the same time.
    """

    def __init__(
        self, max_queue_time_s: float | None, kv: KVCacheManager, queues: RequestQueues, clock: Callable[[], float]
    ) -> None:
        """`max_queue_time_s`: None: no limit on the time. `clock`: seconds from any start."""
        self._max_queue_time_s = max_queue_time_s
        self._kv = kv
        self._queues = queues
        self._clock = clock
        self._rate = DrainRate(clock)
        self._next_return_s: dict[str, float] = {}
        """When the next refused client may try again, on the clock. By the tenant, if tenants have shares."""

    def on_arrival(self, req: Req) -> None:
        """Called with each request, before `check_wait`."""
        queues = self._queues
        if not queues.waiting and not queues.unfinished:
            self._rate.stop()
        cached = self._kv.device_match_len(req) if self._max_queue_time_s is not None else 0
        req.queued_tokens = req.num_tokens - cached

    def on_pause(self) -> None:
        """Nothing leaves the queue from now on, and that is no measure of the engine."""
        self._rate.stop()

    def on_extend(self, batch: ScheduleBatch) -> None:
        """Called after the launch of a step with prompt tokens."""
        queues = self._queues
        num_drained = batch.num_prompt_tokens
        new_rows = {new.row for new in batch.inputs.new_rows}
        for req in batch.reqs:
            if req.row in new_rows:  # what the cache has leaves the queue at once
                num_drained += req.queued_tokens - (req.num_tokens - req.matched_len)
        self._rate.add(num_drained, others_wait=bool(queues.waiting or queues.unfinished))

    def check_wait(self, req: Req) -> None:
        """Raises QueueFull if the request would wait longer than the limit."""
        limit_s = self._max_queue_time_s
        rate = None if limit_s is None else self._rate.tokens_per_s
        if limit_s is None or rate is None:
            return
        wait_s = self._tokens_before(req) / rate
        if wait_s > limit_s:
            retry_after_s = self._retry_after_s(req, wait_s - limit_s, req.queued_tokens / rate)
            raise QueueFull(
                f"the request would wait about {wait_s:.1f} s, and --max-queue-time is {limit_s:g} s; "
                f"try again in {retry_after_s} s",
                retry_after_s=retry_after_s,
            )

    def make_room(self, req: Req) -> tuple[Req, QueueFull] | None:
        """The request to refuse because the waiting queue is full, and its error: the new request, or one that it
        displaces. None: the queue has a place."""
        queues = self._queues
        if not queues.is_full:
            return None
        refused = queues.waiting.gives_way_to(req) or req
        num_waiting = len(queues.waiting)
        rate = self._rate.tokens_per_s
        retry_after_s = None
        if rate is not None:
            one_s = (self._unfinished_tokens() + queues.waiting.num_tokens) / num_waiting / rate
            retry_after_s = self._retry_after_s(refused, one_s, one_s)
        return refused, QueueFull.of(num_waiting, retry_after_s)

    def _tokens_before(self, req: Req) -> int:
        """Tokens to compute before a new request, if those of its tenant and priority keep the order of arrival."""
        return self._unfinished_tokens() + self._queues.waiting.num_tokens_before(req)

    def _unfinished_tokens(self) -> int:
        return sum(req.num_tokens - req.kv_len for req in self._queues.unfinished)

    def _retry_after_s(self, req: Req, drained_s: float, service_s: float) -> int:
        """`drained_s`: until the queue will have a place for the refused request. `service_s`: its own share of it."""
        now, returns = self._clock(), self._next_return_s
        share = self._queues.waiting.share_of(req)
        return_s = min(max(now + drained_s, returns.pop(share, now)), now + MAX_RETRY_AFTER_S)
        while returns and returns[oldest := next(iter(returns))] <= now:
            del returns[oldest]
        returns[share] = return_s + service_s
        return min(max(math.ceil(return_s - now), 1), MAX_RETRY_AFTER_S)
