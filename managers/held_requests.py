"""The requests that the TokenizerManager holds: during restarts, during trials, and before other weights are loaded.

They wait as in the scheduler's queue: `--max-queued-requests` and the waiting timeouts hold for them, too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

import msgspec

from ..srt.errors import MAX_RETRY_AFTER_S, QueueFull, WaitingTimeout
from ..srt.io_struct import GenerateReq
from ..srt.request_options import shorter
from ..srt.server_args import ServerArgs
from ..srt.tenant_weights import parse_weights
from .generation import Generation
from .request_registry import RequestRegistry

_MIN_TIMER_S = 0.02
"""So that the timer of a deadline that is near does not fire all the time while generation is paused."""


class HeldRequests:
    """Belongs to one event loop."""

    def __init__(
        self,
        server_args: ServerArgs,
        requests: RequestRegistry,
        now: Callable[[], float],
        restart_left_s: Callable[[], float | None],
    ) -> None:
        """`requests`: all samples that have not ended. `now`: seconds without those of pauses. `restart_left_s`: until
        new requests are sent again; None: unknown."""
        self._max_num = server_args.max_queued_requests
        self._waiting_s = server_args.waiting_timeout
        self._urgency_sign = -1 if server_args.schedule_low_priority_values_first else 1
        self._has_shares = server_args.schedule_policy == "dlpm"
        self._weights = parse_weights(server_args.tenant_weights)
        self._live = requests.live
        requests.on_end = self._remove
        self._now = now
        self._restart_left_s = restart_left_s
        self._waiting: dict[int, dict[str, dict[Generation, None]]] = {}
        """Those that wait to begin, by urgency and tenant, in order. Without shares, all have the tenant ""."""
        self._places: dict[Generation, tuple[int, str]] = {}
        """Where they are in `_waiting`. So the time to hold or to refuse one does not depend on their number."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def add(self, new: Generation) -> None:
        """Holds a new sample. If there are too many, one of them is refused."""
        if new.waits_to_begin:
            urgency, tenant = self._places[new] = self._place_of(new)
            self._waiting.setdefault(urgency, {}).setdefault(tenant, {})[new] = None
        num_waiting = len(self._places)
        if num_waiting > self._max_num:
            left_s = self._restart_left_s()
            retry_after_s = None if left_s is None else min(max(math.ceil(left_s), 1), MAX_RETRY_AFTER_S)
            self._to_refuse(new).fail(QueueFull.of(num_waiting - 1, retry_after_s))
        self.watch([new])

    def _remove(self, sample: Generation) -> None:
        """The sample is sent, or has ended. It need not have waited here."""
        place = self._places.pop(sample, None)
        if place is None:
            return
        urgency, tenant = place
        level = self._waiting[urgency]
        del level[tenant][sample]
        if not level[tenant]:
            del level[tenant]
        if not level:
            del self._waiting[urgency]

    def watch(self, samples: Iterable[Generation]) -> None:
        """Ends those of these samples without output that are not sent by the end of their waiting time."""
        first = min(map(self._deadline, samples), default=math.inf)
        if first >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = first
        delay_s = max(first - self._now(), _MIN_TIMER_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._end_late)

    def release(self, generation: Generation, request: GenerateReq) -> GenerateReq:
        """The sample is sent now. Returns the request, with the time that it has waited here if that is limited."""
        self._remove(generation)
        if self._limit_s(generation) is None:
            return request
        waited_s = None if _is_waiting_over(generation) else max(self._now() - generation.waits_since, 0.0)
        return msgspec.structs.replace(request, waited_s=waited_s)

    def _end_late(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._now()
        for one in self._live():
            if self._deadline(one) <= now:
                limit_s = self._limit_s(one)
                assert limit_s is not None
                one.fail(WaitingTimeout.of(limit_s))
        self.watch(self._live())

    def _deadline(self, generation: Generation) -> float:
        """Infinite: it has none, or the engine has the sample."""
        limit_s = self._limit_s(generation)
        if limit_s is None or _is_waiting_over(generation) or not generation.waits_for_engine:
            return math.inf
        return generation.waits_since + limit_s

    def _limit_s(self, generation: Generation) -> float | None:
        if generation.request is None:
            return None
        return shorter(self._waiting_s, generation.request.options.waiting_timeout)

    def _to_refuse(self, new: Generation) -> Generation:
        """The sample to refuse, by the rule of the scheduler's queue: among those of the lowest priority, the newest.
        With shares, the newest of the tenant with the most places for its weight."""
        tenants = self._waiting[min(self._waiting)]
        # Of equals the tenant of the new sample: nobody gives way to one that would have as much.
        most = max(tenants, key=lambda name: (len(tenants[name]) / self._weights.get(name, 1.0), new in tenants[name]))
        return next(reversed(tenants[most]))

    def _place_of(self, generation: Generation) -> tuple[int, str]:
        assert generation.request is not None
        options = generation.request.options
        return self._urgency_sign * options.priority, options.tenant if self._has_shares else ""


def _is_waiting_over(generation: Generation) -> bool:
    """It has begun, or it is a suspect.

    A suspect has a limit of its own (`Recovery.end_late`), which begins when the engine runs again. If it ended before,
    the cause of the death would stay unknown, and its client would send it again.
    """
    return generation.has_begun or bool(generation.output_ids) or generation.num_strikes > 0
