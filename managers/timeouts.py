"""The time limits of requests: how long each may wait for its first step, and how long it may run after that."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from ..srt.errors import WaitingTimeout
from ..srt.io_struct import AbortFinish
from ..srt.request_options import shorter
from .req import Req, Stage

# Added to the limit of the heap's length, so that a short heap is not rebuilt all the time.
_HEAP_SLACK = 64


class Timeouts:
    """Finds the requests that are over their limit. While generation is paused, the time of all requests stands still.

    A request has at most one deadline: the end of its waiting time, or since its first step the end of its running
    time. Deadlines are in a heap, so a turn looks only at the earliest one. An entry is void when the request has
    another deadline by now or has ended. Void entries are removed before they are the majority. What a request had run
    since its first token in an engine that has died counts, too.
    """

    def __init__(self, waiting_s: float | None, running_s: float | None, clock: Callable[[], float]) -> None:
        """`waiting_s`, `running_s`: the limits of all requests; None: no limit. A request may have shorter ones."""
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._clock = clock
        self._paused_at: float | None = None
        self._paused_s = 0.0
        """Length of all pauses that are over."""
        self._heap: list[tuple[float, int, Req]] = []
        """Deadline, number of the arrival, request."""
        self._max_len = _HEAP_SLACK

    @property
    def is_armed(self) -> bool:
        """Whether any request may have a deadline."""
        return bool(self._heap)

    def on_arrival(self, req: Req, waited_s: float | None = 0.0) -> None:
        """`waited_s`: how long it has waited before. None: it has had its first step, in an engine that has died."""
        if waited_s is None:
            self._begin(req)
            return
        limit_s = shorter(self._waiting_s, req.options.waiting_timeout)
        if limit_s is not None:
            self._set(req, self._now() + limit_s - waited_s)

    def on_launch(self, reqs: Iterable[Req]) -> None:
        """Call it for each step with prompts."""
        for req in reqs:
            if not req.has_begun:
                self._begin(req)

    def take_late(self) -> list[tuple[Req, AbortFinish]]:
        """The requests that are over their limit since the last call, each with the reason for its end."""
        late: list[tuple[Req, AbortFinish]] = []
        while self._heap and self._heap[0][0] <= self._now():
            entry = heapq.heappop(self._heap)
            if _is_valid(entry):
                late.append((entry[2], self._reason(entry[2])))
                entry[2].deadline = math.inf  # the heap may have it twice: both limits may end at the same time
        return late

    def pause(self) -> None:
        """The time stands still from now on."""
        if self._paused_at is None:
            self._paused_at = self._clock()

    def resume(self) -> None:
        """The time runs again."""
        if self._paused_at is not None:
            self._paused_s += self._clock() - self._paused_at
            self._paused_at = None

    def _now(self) -> float:
        return (self._clock() if self._paused_at is None else self._paused_at) - self._paused_s

    def _begin(self, req: Req) -> None:
        req.has_begun = True
        limit_s = shorter(self._running_s, req.options.running_timeout)
        self._set(req, math.inf if limit_s is None else self._now() + limit_s - req.ran_s)

    def _set(self, req: Req, deadline: float) -> None:
        req.deadline = deadline
        if deadline == math.inf:
            return
        heapq.heappush(self._heap, (deadline, req.arrival, req))
        if len(self._heap) > self._max_len:
            self._heap = [entry for entry in self._heap if _is_valid(entry)]
            heapq.heapify(self._heap)
            self._max_len = 2 * len(self._heap) + _HEAP_SLACK

    def _reason(self, req: Req) -> AbortFinish:
        if not req.has_begun:
            limit_s = shorter(self._waiting_s, req.options.waiting_timeout)
            assert limit_s is not None
            return AbortFinish.of(WaitingTimeout.of(limit_s))
        limit_s = shorter(self._running_s, req.options.running_timeout)
        return AbortFinish(f"the request has run for {limit_s:g} s, the limit of its running time")


def _is_valid(entry: tuple[float, int, Req]) -> bool:
    deadline, _, req = entry
    return req.deadline == deadline and req.stage is not Stage.FINISHED
