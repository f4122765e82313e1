"""The counters of requests in the HTTP process, for /metrics: totals, and histograms of times.

Only a server with `--enable-metrics` has a RequestMetrics. Its TokenizerManager makes ObservedGenerations, which count.
Otherwise it makes plain Generations, which do not count. The counters are plain numbers of one event loop, because a
counter of `prometheus_client` takes a lock each time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from ..srt.io_struct import AbortFinish, TextOut
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
OTHER_TENANTS = "other"
"""All tenants that came later."""


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


class RequestMetrics(RequestCounts):
    """Totals since the start of the server."""

    def __init__(self) -> None:
        super().__init__(_QUEUE_BOUNDS)
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
        """By the name of the tenant; "" for requests without one. At most MAX_TENANTS and OTHER_TENANTS."""

    def tenant(self, name: str) -> TenantCounts:
        """The counts of a tenant."""
        found = self.tenants.get(name)
        if found is None and len(self.tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
            found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = TenantCounts()
        return found

    def generation(self, owner: GenerationOwner, index: int, key: str) -> Generation:
        """A sample that is counted here."""
        return ObservedGeneration(owner, index, key, self)


class ObservedGeneration(Generation):
    """A Generation that reports its outputs to RequestMetrics."""

    def __init__(
        self,
        owner: GenerationOwner,
        index: int,
        key: str,
        metrics: RequestMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds from any start."""
        super().__init__(owner, index, key)
        self._metrics = metrics
        self._clock = clock
        self._opened = clock()
        self._first_token_at = self._last_token_at = 0.0
        self._num_tokens = self._num_first_tokens = 0
        self._first_token_life: int | None = None
        """`num_recoveries` at the first token. None: no token, or the first one came from another server."""
        self._is_prompt_counted = False

    def restore(self, out: TextOut, num_recoveries: int, first_token_s: float | None) -> None:
        super().restore(out, num_recoveries, first_token_s)
        # The other process has counted this output.
        self._is_prompt_counted = True
        self._num_tokens = self._num_first_tokens = out.counts.completion_tokens
        self._first_token_at = self._last_token_at = self._clock()

    def push(self, out: TextOut) -> None:
        was_over = self.is_over
        super().push(out)
        if was_over or (out.finish is not None and not self.is_over):
            return  # it has ended before, or the queue was full and the sample is sent again
        counts = out.counts
        if not self._is_prompt_counted and (counts.completion_tokens or counts.queue_time_s is not None):
            self._is_prompt_counted = True
            self._metrics.prompt_tokens += counts.prompt_tokens
            self._metrics.device_tokens += counts.cached_tokens - counts.host_tokens - counts.storage_tokens
            self._metrics.host_tokens += counts.host_tokens
            self._metrics.storage_tokens += counts.storage_tokens
            self._tenant().prefill_tokens += counts.prompt_tokens - counts.cached_tokens
        num_new = counts.completion_tokens - self._num_tokens
        if num_new > 0:
            self._count_tokens(num_new, self._clock())
        if out.finish is not None:
            self._count_end(out)

    def _tenant(self) -> TenantCounts:
        # The request of a continued stream has the tenant that began the stream.
        options = self._owner.options if self.request is None else self.request.options
        return self._metrics.tenant(options.tenant)

    def _count_tokens(self, num_new: int, now: float) -> None:
        metrics, tenant = self._metrics, self._tenant()
        metrics.generation_tokens += num_new
        tenant.generation_tokens += num_new
        self._num_tokens += num_new
        if self._num_tokens == num_new:
            metrics.time_to_first_token.observe(now - self._opened)
            tenant.time_to_first_token.observe(now - self._opened)
            self._first_token_at = now
            self._first_token_life = self.num_recoveries
            self._num_first_tokens = num_new
        else:
            metrics.inter_token_latency.observe((now - self._last_token_at) / num_new, num_new)
        self._last_token_at = now

    def _count_end(self, out: TextOut) -> None:
        queue_time_s = out.counts.queue_time_s
        counted: tuple[RequestCounts, ...] = (self._metrics, self._tenant())
        for one in counted:
            one.num_requests += 1
            one.num_aborted += isinstance(out.finish, AbortFinish)
            if queue_time_s is not None:
                one.queue_time.observe(queue_time_s)
        if queue_time_s is not None or self._num_tokens:
            self._metrics.e2e_request_latency.observe(self._clock() - self._opened)
        decode_s = self._last_token_at - self._first_token_at
        num_decoded = self._num_tokens - self._num_first_tokens
        throughput = num_decoded / decode_s if num_decoded and decode_s > 0 else None
        first_token_s = self.first_token_s
        prefill_s = None
        # After a restart, `queue_time_s` is of the new engine.
        if first_token_s is not None and queue_time_s is not None and self._first_token_life == self.num_recoveries:
            prefill_s = max(first_token_s - queue_time_s, 0.0)
        self.timings = Timings(queue_time_s, first_token_s, throughput, prefill_s)
