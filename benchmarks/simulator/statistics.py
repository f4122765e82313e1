"""The figures of a simulated run, in memory that does not grow with the number of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...srt.io_struct import AbortFinish, FinishReason
from .histogram import LogHistogram


@dataclass(slots=True)
class Served:
    """A request that has ended."""

    tenant: int | str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    first_token_s: float | None
    """None: it ended before its first token."""
    end_s: float
    finish: FinishReason


@dataclass(slots=True)
class HitCounts:
    """Prompt tokens of requests that were admitted, and those that the cache had."""

    num_tokens: int = 0
    num_cached: int = 0


@dataclass
class RunStatistics:
    """Counts and histograms of one run. Latencies are those of requests that ended by themselves."""

    slos_s: Mapping[str, float] = field(default_factory=dict)
    """Objectives in seconds by name: ttft, tpot, e2el."""
    ttft: LogHistogram = field(default_factory=LogHistogram)
    tpot: LogHistogram = field(default_factory=LogHistogram)
    e2el: LogHistogram = field(default_factory=LogHistogram)
    gaps: LogHistogram = field(default_factory=LogHistogram)
    """Between two tokens of a request."""
    num_completed: int = 0
    num_aborted: int = 0
    """Their clients left."""
    num_refused: int = 0
    """The queue was full, or the request was too long."""
    first_refusal: str = ""
    """What the server said to the first of them."""
    num_good: int = 0
    """Completed within all objectives."""
    num_output_tokens: int = 0
    num_admitted_tokens: int = 0
    """Prompt tokens of all requests that were admitted, each counted once."""
    num_cached_tokens: int = 0
    """Those of them that the prefix cache had."""
    last_end_s: float = 0.0
    tenant_tokens: dict[int | str, int] = field(default_factory=lambda: defaultdict(int))
    tenant_s: dict[int | str, float] = field(default_factory=lambda: defaultdict(float))
    tenant_prompts: dict[int | str, HitCounts] = field(default_factory=lambda: defaultdict(HitCounts))

    def add(self, served: Served) -> None:
        self.last_end_s = served.end_s
        self.num_output_tokens += served.num_output_tokens
        latency_s = served.end_s - served.arrival_s
        self.tenant_tokens[served.tenant] += served.num_output_tokens
        self.tenant_s[served.tenant] += latency_s
        if isinstance(served.finish, AbortFinish):
            self.num_aborted += served.finish.err_type is None
            if served.finish.err_type is not None:
                self.num_refused += 1
                self.first_refusal = self.first_refusal or served.finish.message
            return
        assert served.first_token_s is not None
        self.num_completed += 1
        ttft_s = served.first_token_s - served.arrival_s
        num_more = served.num_output_tokens - 1
        tpot_s = (latency_s - ttft_s) / num_more if num_more > 0 else 0.0
        self.ttft.add(ttft_s)
        self.e2el.add(latency_s)
        if num_more > 0:
            self.tpot.add(tpot_s)
        found = {"ttft": ttft_s, "tpot": tpot_s, "e2el": latency_s}
        self.num_good += all(found[name] <= limit_s for name, limit_s in self.slos_s.items())

    def on_admission(self, tenant: int | str, num_prompt_tokens: int, num_cached: int) -> None:
        counts = self.tenant_prompts[tenant]
        counts.num_tokens += num_prompt_tokens
        counts.num_cached += num_cached
        self.num_admitted_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / max(self.num_admitted_tokens, 1)

    @property
    def tenant_hit_rates(self) -> dict[int | str, float]:
        return {tenant: counts.num_cached / max(counts.num_tokens, 1) for tenant, counts in self.tenant_prompts.items()}

    @property
    def fairness(self) -> float | None:
        """Jain's index of the tenants' speeds; None with fewer than two tenants, and without output tokens. A speed is
        output tokens per second that a tenant's requests were in the system, also those that did not complete."""
        if len(self.tenant_s) < 2 or not self.num_output_tokens:
            return None
        return jain_index([self.tenant_tokens[one] / max(self.tenant_s[one], 1e-9) for one in self.tenant_s])


def jain_index(values: Sequence[float]) -> float:
    """1 if all values are equal, 1 / n if one has everything (Jain, Chiu and Hawe, 1984)."""
    numbers = np.array(values)
    return float(numbers.sum() ** 2 / (len(numbers) * np.square(numbers).sum()))
