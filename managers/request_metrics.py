"""The counters of requests in the HTTP process, for /metrics: totals, and histograms of times.

Only a server with `--enable-metrics` has a RequestMetrics. Its TokenizerManager makes ObservedGenerations, which count.
Otherwise it makes plain Generations, which do not count. The counters are plain numbers of one event loop, because a
counter of `prometheus_client` takes a lock each time.

The tokens of a message came at the same time. Requests whose last tokens came with the same message, too, have the same
gap between them, so each gap is counted once for all of them, at the end of the message.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from ..srt.io_struct import AbortFinish, Counts, TextOut
from ..srt.tenant_names import OTHER_TENANTS
from .generation import Generation, GenerationOwner, Timings

# SGLang's bounds, so that existing dashboards and alerts read the same percentiles. In seconds.
_TTFT_BOUNDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
_E2E_BOUNDS = (*_TTFT_BOUNDS, 600, 1200, 1800, 2400)
_INTER_TOKEN_BOUNDS = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080, 0.100),
    *(0.200, 0.400, 0.600, 0.800, 1, 2, 4, 6, 8),
)
_QUEUE_BOUNDS = (
    *(0, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    *(200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)

# A part of the bounds above: each tenant has a histogram.
_TENANT_QUEUE_BOUNDS = (0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 100, 200, 400, 600, 1000)


class Histogram:
    """Counts values by bucket. A value belongs to the first bucket whose bound is not below it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """One more than `bounds`: the last bucket has no bound."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: the bound as text, and the number of values up to it."""
        buckets, count = [], 0
        for bound, num_in_bucket in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            count += num_in_bucket
            buckets.append((bound, float(count)))
        return buckets


MAX_TENANTS = 64
"""The number of tenants with counts of their own. Each has 44 lines in /metrics."""


class RequestCounts:
    """What is counted in total and for each tenant. A sample (one of `n` of one prompt) counts as a request."""

    def __init__(self, queue_bounds: Sequence[float]) -> None:
        self.num_requests = 0
        """Requests that have ended in any way."""
        self.num_aborted = 0
        """Requests that the client aborted, and requests that ended with an error."""
        self.generation_tokens = 0
        self.time_to_first_token = Histogram(_TTFT_BOUNDS)
        self.queue_time = Histogram(queue_bounds)


class TenantCounts(RequestCounts):
    """The counts of one tenant."""

    def __init__(self) -> None:
        super().__init__(_TENANT_QUEUE_BOUNDS)
        self.prefill_tokens = 0
        """Prompt tokens that the prefix cache did not have."""
        self.arrival = Arrival(self, -math.inf)
        """The newest one."""


class Arrival:
    """A message that had tokens of a tenant. Each request refers to the arrival of its last token."""

    __slots__ = ("at_s", "following", "num_next", "tenant")

    def __init__(self, tenant: TenantCounts, at_s: float) -> None:
        self.tenant = tenant
        self.at_s = at_s
        self.following: Arrival | None = None
        """The current message, if requests whose last token came here have their next ones in it."""
        self.num_next: list[int] = []
        """The number of new tokens of each of them."""


class RequestMetrics(RequestCounts):
    """Totals since the start of the server. Push outputs only between `begin_message` and `end_message`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds from any start."""
        super().__init__(_QUEUE_BOUNDS)
        self.clock = clock
        self.now_s = 0.0
        """When the current message came."""
        self._followed: list[Arrival] = []
        """Arrivals that the current message follows."""
        self.prompt_tokens = 0
        """Tokens of all prompts that were computed. Each sample of a prompt counts them."""
        self.device_tokens = 0
        """Those of them that the prefix cache had in the KV pool."""
        self.host_tokens = 0
        """Those of them that came from host memory."""
        self.storage_tokens = 0
        """Those of them that came from files."""
        self.inter_token_latency = Histogram(_INTER_TOKEN_BOUNDS)
        self.e2e_request_latency = Histogram(_E2E_BOUNDS)
        """Of those that had their first step. A refusal takes no time, so an overloaded server would look fast."""
        self.tenants: dict[str, TenantCounts] = {}
        """By the name of the tenant; "" for requests without one. At most MAX_TENANTS, and OTHER_TENANTS for all later
        ones."""

    def begin_message(self) -> None:
        """The outputs of a message follow."""
        self.end_message()  # otherwise nothing would count what a message that failed has brought
        self.now_s = self.clock()

    def end_message(self) -> None:
        """Counts the tokens of the message, except first tokens, which are counted already."""
        for arrival in self._followed:
            gap_s = self.now_s - arrival.at_s
            for num_new, num_requests in Counter(arrival.num_next).items():
                num_tokens = num_new * num_requests
                self.generation_tokens += num_tokens
                arrival.tenant.generation_tokens += num_tokens
                self.inter_token_latency.observe(gap_s / num_new, num_tokens)
            arrival.following = None
            arrival.num_next.clear()
        self._followed.clear()

    def tenant(self, name: str) -> TenantCounts:
        """The counts of a tenant."""
        found = self.tenants.get(name)
        if found is None and len(self.tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
            found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantCounts()
        return found

    def arrival(self, tenant: TenantCounts) -> Arrival:
        """The current message, for a tenant that has tokens in it."""
        if tenant.arrival.at_s != self.now_s:
            tenant.arrival = Arrival(tenant, self.now_s)
        return tenant.arrival

    def follow(self, last: Arrival) -> Arrival:
        """The current message, which is the first one to follow `last`, or the first one since it was counted."""
        self._followed.append(last)
        last.following = self.arrival(last.tenant)
        return last.following

    def generation(self, owner: GenerationOwner, index: int, key: str) -> Generation:
        """A sample that is counted here."""
        return ObservedGeneration(owner, index, key, self)


class ObservedGeneration(Generation):
    """A Generation that reports its outputs to RequestMetrics."""

    # A dictionary with the attributes of both classes would be too large for Python's faster kind.
    __slots__ = (
        "_arrival",
        "_first_token_at_s",
        "_first_token_life",
        "_is_prompt_counted",
        "_metrics",
        "_num_first_tokens",
        "_num_tokens",
        "_opened_s",
    )

    def __init__(self, owner: GenerationOwner, index: int, key: str, metrics: RequestMetrics) -> None:
        super().__init__(owner, index, key)
        self._metrics = metrics
        self._opened_s = metrics.clock()
        self._first_token_at_s = 0.0
        self._arrival: Arrival | None = None
        """Of its last token. None: it has none."""
        self._num_tokens = self._num_first_tokens = 0
        self._first_token_life: int | None = None
        """`num_recoveries` at the first token. None: no token, or the first one came from another server."""
        self._is_prompt_counted = False

    def restore(self, out: TextOut, num_recoveries: int, first_token_s: float | None) -> None:
        super().restore(out, num_recoveries, first_token_s)
        # The other process has counted this output.
        self._is_prompt_counted = True
        self._num_tokens = self._num_first_tokens = out.counts.completion_tokens
        if self._num_tokens:
            self._first_token_at_s = self._metrics.clock()
            self._arrival = Arrival(self._tenant(), self._first_token_at_s)

    def push(self, out: TextOut) -> None:
        was_over = self.is_over
        Generation.push(self, out)
        last = self._arrival
        if last is None or self.is_over:
            if not was_over:
                self._count_first_or_last(out)
            return
        num_new = self._counts.completion_tokens - self._num_tokens
        if num_new > 0:
            self._count_next(num_new, last)

    def _count_first_or_last(self, out: TextOut) -> None:
        if out.finish is not None and not self.is_over:
            return  # the queue was full, and the sample is sent again
        if not self._is_prompt_counted:
            self._count_prompt(out.counts)
        num_new, last = self._counts.completion_tokens - self._num_tokens, self._arrival
        if num_new > 0:
            if last is None:
                self._count_first(num_new)
            else:
                self._count_next(num_new, last)
        if out.finish is not None:
            self._count_end(out)

    def _tenant(self) -> TenantCounts:
        return self._metrics.tenant(self._owner.options.tenant)

    def _count_prompt(self, counts: Counts) -> None:
        if not counts.completion_tokens and counts.queue_time_s is None:
            return
        self._is_prompt_counted = True
        self._metrics.prompt_tokens += counts.prompt_tokens
        self._metrics.device_tokens += counts.cached_tokens - counts.host_tokens - counts.storage_tokens
        self._metrics.host_tokens += counts.host_tokens
        self._metrics.storage_tokens += counts.storage_tokens
        self._tenant().prefill_tokens += counts.prompt_tokens - counts.cached_tokens

    def _count_first(self, num_new: int) -> None:
        metrics, tenant = self._metrics, self._tenant()
        self._num_tokens = self._num_first_tokens = num_new
        self._arrival = metrics.arrival(tenant)
        self._first_token_at_s = metrics.now_s
        self._first_token_life = self.num_recoveries
        for one in (metrics, tenant):
            one.generation_tokens += num_new
            one.time_to_first_token.observe(metrics.now_s - self._opened_s)

    def _count_next(self, num_new: int, last: Arrival) -> None:
        self._num_tokens += num_new
        self._arrival = last.following or self._metrics.follow(last)
        last.num_next.append(num_new)

    def _count_end(self, out: TextOut) -> None:
        queue_time_s = out.counts.queue_time_s
        counted: tuple[RequestCounts, ...] = (self._metrics, self._tenant())
        for one in counted:
            one.num_requests += 1
            one.num_aborted += isinstance(out.finish, AbortFinish)
            if queue_time_s is not None:
                one.queue_time.observe(queue_time_s)
        if queue_time_s is not None or self._num_tokens:
            self._metrics.e2e_request_latency.observe(self._metrics.clock() - self._opened_s)
        num_decoded = self._num_tokens - self._num_first_tokens
        decode_s = 0.0 if self._arrival is None else self._arrival.at_s - self._first_token_at_s
        throughput = num_decoded / decode_s if num_decoded and decode_s > 0 else None
        first_token_s = self.first_token_s
        prefill_s = None
        # After a restart, `queue_time_s` is of the new engine.
        if first_token_s is not None and queue_time_s is not None and self._first_token_life == self.num_recoveries:
            prefill_s = max(first_token_s - queue_time_s, 0.0)
        self.timings = Timings(queue_time_s, first_token_s, throughput, prefill_s)
