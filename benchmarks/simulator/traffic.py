"""Requests that arrive at the simulated server: at times of their own, as earlier ones end, or as a session goes on."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...srt.request_options import RequestOptions


class Session(Protocol):
    """The client behind successive requests, which sends the next one when the last one has ended."""

    def next(self, request: SimRequest, ended_s: float, output_ids: list[int]) -> SimRequest | None:
        """The next request, which arrives later; None: the session is over."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request of the traffic."""

    arrival_s: float
    prompt_ids: np.ndarray
    """int32 [n]"""
    num_output_tokens: int
    """Tokens after which it ends, at least 1."""
    max_new_tokens: int = 0
    """The limit that the client sends; 0: `num_output_tokens`."""
    tenant: int | str = 0
    """Its number, or the name of a recorded one."""
    priority: int = 0
    aborts_after_s: float | None = None
    """Seconds from its arrival until its client leaves, if it has not ended before."""
    session: Session | None = None
    ends_in_tool_call: bool = False
    """Its client runs a tool and comes back."""
    options: RequestOptions | None = None
    """The options of a recorded request."""
    recorded_ids: np.ndarray | None = None
    """The output of a recorded request. Tokens after it are the device's."""
    stop_id: int | None = None
    """The last token of `recorded_ids`, if it ends the request."""
    number: int = -1
    """Numbers follow the order of arrival."""


@dataclass(slots=True, order=True)
class _Due:
    at_s: float
    place: int
    request: SimRequest = field(compare=False)


class Traffic:
    """Requests in the order of their arrival. Only the next one and those of sessions exist before they arrive."""

    def __init__(
        self,
        requests: Iterator[SimRequest],
        max_concurrency: int | None = None,
        round_trip_s: float | Iterable[float] = 0.0,
    ) -> None:
        """`requests`: with times that do not decrease. `max_concurrency`: a request is held back while so many run.
        Its time then counts from its arrival. `round_trip_s`: from the end of a request in the scheduler until the one
        that was held back for it arrives there; or one time for each end."""
        self._requests = requests
        times_s = round_trip_s if isinstance(round_trip_s, Iterable) else itertools.repeat(round_trip_s)
        self._round_trips_s = iter(times_s)
        self._slots_s = None if max_concurrency is None else [0.0] * max_concurrency
        """A heap: from when on each free place of `max_concurrency` can be used."""
        self._next = next(requests, None)
        self._later: list[_Due] = []
        self._places = itertools.count()
        self._num_taken = 0

    @property
    def next_s(self) -> float | None:
        """When the next request arrives; None: not before another one ends, or never."""
        if self._slots_s == []:
            return None
        if self._is_later_first:
            at_s = self._later[0].at_s
        elif self._next is not None:
            at_s = self._next.arrival_s
        else:
            return None
        return max(at_s, self._slots_s[0] if self._slots_s else 0.0)

    @property
    def _is_later_first(self) -> bool:
        return bool(self._later) and (self._next is None or self._later[0].at_s <= self._next.arrival_s)

    def take(self, now_s: float) -> Iterator[SimRequest]:
        """The requests that have arrived by now."""
        while (at_s := self.next_s) is not None and at_s <= now_s:
            if self._is_later_first:
                request = heapq.heappop(self._later).request
            else:
                assert self._next is not None
                request = self._next
                self._next = next(self._requests, None)
                if self._next is not None and self._next.arrival_s < request.arrival_s:
                    raise ValueError("the times of requests must not decrease")
            request.arrival_s = at_s
            request.number = self._num_taken
            self._num_taken += 1
            if self._slots_s is not None:
                heapq.heappop(self._slots_s)
            yield request

    def on_end(self, request: SimRequest, now_s: float, output_ids: list[int]) -> None:
        """A request has ended in any way. `output_ids`: empty without a session."""
        if self._slots_s is not None:
            heapq.heappush(self._slots_s, now_s + next(self._round_trips_s))
        if request.session is not None:
            following = request.session.next(request, now_s, output_ids)
            if following is not None:
                assert following.arrival_s >= now_s
                heapq.heappush(self._later, _Due(following.arrival_s, next(self._places), following))
