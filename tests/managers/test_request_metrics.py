from __future__ import annotations

import bisect
from itertools import pairwise
from typing import Any

import pytest
from fake_http import FakeScheduler, make_manager
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeClock
from tercet.managers import request_metrics
from tercet.managers.generation import Generation
from tercet.managers.request_metrics import Histogram, ObservedGeneration, RequestMetrics, TenantCounts
from tercet.srt.entrypoints.metrics import MetricsPage
from tercet.srt.errors import QueueFull
from tercet.srt.io_struct import AbortFinish, Counts, FinishReason, LengthFinish, TextOut, TokenOut
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


class Owner:
    rid = "r"
    prompt_ids = (1, 2, 3)

    def __init__(self, tenant: str = "") -> None:
        self.options = RequestOptions(sampling=SamplingParams(), tenant=tenant)

    def stop(self, generation: Generation) -> None: ...

    def held_text(self, generation: Generation) -> str:
        return ""

    def on_end(self, generation: Generation) -> None: ...


class Observed:
    """One observed sample, with a clock that the test moves."""

    def __init__(self, metrics: RequestMetrics | None = None, tenant: str = "", clock: FakeClock | None = None) -> None:
        """`clock`: that of `metrics`."""
        self.clock = clock or FakeClock()
        self.metrics = metrics or RequestMetrics(self.clock)
        self.generation = ObservedGeneration(Owner(tenant), 0, "0", self.metrics)

    def push(
        self,
        after_s: float,
        num_tokens: int,
        finish: FinishReason | None = None,
        *,
        cached: int = 0,
        queue_s: float | None = 0.5,
    ) -> None:
        self.clock.now += after_s
        self.metrics.begin_message()
        self.push_in_message(num_tokens, finish, cached=cached, queue_s=queue_s)
        self.metrics.end_message()

    def push_in_message(
        self, num_tokens: int, finish: FinishReason | None = None, *, cached: int = 0, queue_s: float | None = 0.5
    ) -> None:
        counts = Counts(3, num_tokens, cached, 0, queue_s if finish is not None else None)
        tokens = TokenOut(rid="0", token_ids=[], finish=finish, counts=counts)
        self.generation.push(TextOut(tokens=tokens, text=""))


@given(st.lists(st.floats(0, 10), max_size=30), st.lists(st.floats(0, 10), min_size=1, max_size=8, unique=True))
def test_a_histogram_counts_each_value_in_every_bucket_above_it(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(sorted(bounds))
    for value in values:
        histogram.observe(value)
    ordered = sorted(values)
    for bound, count in histogram.cumulative():
        assert count == bisect.bisect_right(ordered, float(bound))
    assert histogram.cumulative()[-1] == ("+Inf", len(values))
    assert histogram.total == pytest.approx(sum(values))


def test_the_bounds_rise() -> None:
    metrics = RequestMetrics()
    for one in (*vars(metrics).values(), *vars(metrics.tenant("ann")).values()):
        if isinstance(one, Histogram):
            assert all(low < high for low, high in pairwise(one.bounds))


def test_a_request_is_counted_as_its_tokens_come() -> None:
    seen = Observed()
    metrics = seen.metrics
    seen.push(2.0, 1, cached=2)
    assert (metrics.prompt_tokens, metrics.device_tokens, metrics.generation_tokens) == (3, 2, 1)
    assert metrics.num_requests == 0
    seen.push(0.5, 2)
    seen.push(1.5, 5)
    seen.push(0.5, 6, LengthFinish(6))
    assert (metrics.prompt_tokens, metrics.device_tokens, metrics.generation_tokens) == (3, 2, 6)
    assert (metrics.num_requests, metrics.num_aborted) == (1, 0)
    assert metrics.time_to_first_token.total == 2.0
    assert metrics.e2e_request_latency.total == 4.5
    assert metrics.queue_time.total == 0.5
    inter_token = metrics.inter_token_latency
    assert inter_token.total == pytest.approx(2.5)
    assert inter_token.counts[inter_token.bounds.index(0.6)] == sum(inter_token.counts) == 5
    assert seen.generation.timings is not None
    assert seen.generation.timings.queue_time == 0.5
    assert seen.generation.timings.decode_throughput == 2.0


def test_prompt_tokens_are_counted_by_the_place_where_their_kv_was() -> None:
    seen = Observed(tenant="ann")
    counts = Counts(90, 1, cached_tokens=80, queue_time_s=0.5, host_tokens=30, storage_tokens=45)
    for _ in range(2):
        tokens = TokenOut(rid="0", token_ids=[], finish=None, counts=counts)
        seen.generation.push(TextOut(tokens=tokens, text=""))
    metrics = seen.metrics
    found = (metrics.prompt_tokens, metrics.device_tokens, metrics.host_tokens, metrics.storage_tokens)
    assert found == (90, 5, 30, 45) and metrics.tenant("ann").prefill_tokens == 10


@pytest.mark.parametrize("num_before", [0, 4])
def test_of_a_stream_of_another_server_only_what_is_new_is_counted(num_before: int) -> None:
    seen = Observed()
    metrics = seen.metrics
    seen.clock.now = 5.0
    tokens = TokenOut(rid="0", token_ids=[], finish=None, counts=Counts(3, num_before))
    seen.generation.restore(TextOut(tokens=tokens, text="abcd"), 1, 0.5 if num_before else None)
    seen.push(2.0, num_before + 2)
    seen.push(1.0, num_before + 3, LengthFinish(num_before + 3))
    assert (metrics.generation_tokens, metrics.num_requests, metrics.prompt_tokens) == (3, 1, 0)
    assert sum(metrics.time_to_first_token.counts) == (0 if num_before else 1)
    assert metrics.inter_token_latency.total == (3.0 if num_before else 1.0)
    timings = seen.generation.timings
    assert timings is not None and timings.decode_throughput == 1.0
    assert (timings.prefill_time is None) == (num_before > 0)
    assert seen.generation.num_recoveries == 1


def test_an_output_without_new_tokens_and_an_output_after_the_end_count_nothing() -> None:
    seen = Observed()
    seen.push(1.0, 1)
    seen.push(1.0, 1)
    seen.push(1.0, 2, LengthFinish(2))
    for _ in range(2):
        assert (seen.metrics.generation_tokens, seen.metrics.num_requests) == (2, 1)
        assert seen.metrics.inter_token_latency.total == 2.0
        seen.push(1.0, 2, AbortFinish("too late"))


def test_tokens_that_all_came_at_once_have_no_rate() -> None:
    seen = Observed()
    seen.push(1.0, 1)
    seen.push(0.0, 3, LengthFinish(3))
    assert seen.generation.timings is not None and seen.generation.timings.decode_throughput is None


@pytest.mark.parametrize(
    ("num_tokens", "queue_s", "is_counted"), [(0, None, False), (0, 0.5, True), (1, None, True), (1, 0.5, True)]
)
def test_of_a_request_without_a_step_neither_prompt_nor_time_is_counted(
    num_tokens: int, queue_s: float | None, is_counted: bool
) -> None:
    seen = Observed()
    seen.push(1.0, num_tokens, AbortFinish("refused"), queue_s=queue_s)
    assert seen.metrics.prompt_tokens == (3 if is_counted else 0)
    assert sum(seen.metrics.e2e_request_latency.counts) == is_counted
    assert seen.metrics.num_requests == seen.metrics.num_aborted == 1


def test_messages_that_are_counted_are_forgotten() -> None:
    seen = Observed()
    for num_tokens in range(1, 9):
        seen.push(1.0, num_tokens)
        assert not seen.metrics._followed


class BusyMetrics(RequestMetrics):
    """The event loop counts a request after so many reads of the page, which another thread makes."""

    num_reads = -1

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in vars(RequestMetrics()):
            self.num_reads -= 1
            if self.num_reads == 0:
                count = Counts(9, 2, cached_tokens=8, queue_time_s=0.5, host_tokens=3, storage_tokens=4)
                tokens = TokenOut(rid="0", token_ids=[], finish=LengthFinish(2), counts=count)
                generation = Observed(self).generation
                self.begin_message()
                generation.push(TextOut(tokens=tokens, text=""))
                self.end_message()
        return found


@pytest.mark.parametrize("num_reads", range(1, 16))
def test_no_counter_falls_from_one_page_to_the_next(num_reads: int) -> None:
    metrics = BusyMetrics()
    page = MetricsPage(make_manager(FakeScheduler()), metrics)
    metrics.num_reads = num_reads
    before, after = (
        {(one.name, *one.labels.items()): one.value for family in page.collect() for one in family.samples}
        for _ in range(2)
    )
    assert metrics.num_requests == 1
    assert not [name for name, value in before.items() if value > after[name]]


OUTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=8)


@given(st.lists(st.tuples(st.floats(0.001, 3), OUTS), max_size=12))
def test_the_gap_before_each_token_is_that_of_its_own_request(
    messages: list[tuple[float, list[tuple[int, int]]]],
) -> None:
    """Each message brings requests some tokens; a request may have two outputs in it. Requests 0 to 2 have a tenant."""
    clock = FakeClock()
    metrics = RequestMetrics(clock)
    some = [Observed(metrics, "ann" if number < 3 else "bob") for number in range(6)]
    expected = Histogram(metrics.inter_token_latency.bounds)
    last_s: dict[int, float] = {}
    num_tokens = [0] * 6
    for after_s, outs in messages:
        clock.now += after_s
        metrics.begin_message()
        for number, num_new in outs:
            if number in last_s:
                expected.observe((clock.now - last_s[number]) / num_new, num_new)
            last_s[number] = clock.now
            num_tokens[number] += num_new
            some[number].push_in_message(num_tokens[number])
        metrics.end_message()
    assert metrics.inter_token_latency.counts == expected.counts
    assert metrics.inter_token_latency.total == pytest.approx(expected.total)
    assert metrics.generation_tokens == sum(num_tokens)
    by_tenant = {"ann": sum(num_tokens[:3]), "bob": sum(num_tokens[3:])}
    assert {name: one.generation_tokens for name, one in metrics.tenants.items()} == {
        name: count for name, count in by_tenant.items() if count
    }


def test_the_tokens_of_a_message_that_failed_are_counted_with_the_next_one() -> None:
    seen = Observed()
    seen.push(1.0, 1)
    seen.clock.now += 0.5
    seen.metrics.begin_message()
    seen.push_in_message(2)
    seen.push(1.5, 3)
    assert seen.metrics.generation_tokens == 3
    assert seen.metrics.inter_token_latency.total == 2.0


class CountedHistogram(Histogram):
    num_calls = 0

    def observe(self, value: float, times: int = 1) -> None:
        self.num_calls += 1
        super().observe(value, times)


def test_a_message_of_equal_gaps_is_one_observation() -> None:
    metrics = RequestMetrics()
    gaps = metrics.inter_token_latency = CountedHistogram(metrics.inter_token_latency.bounds)
    some = [Observed(metrics) for _ in range(50)]
    for num_tokens in range(1, 11):
        metrics.begin_message()
        for one in some:
            one.push_in_message(num_tokens)
        metrics.end_message()
    assert gaps.num_calls == 9 and sum(gaps.counts) == 9 * 50


def test_an_answer_without_a_token_has_a_prompt() -> None:
    seen = Observed()
    seen.push(1.0, 0, LengthFinish(0))
    assert (seen.metrics.prompt_tokens, seen.metrics.generation_tokens, seen.metrics.num_requests) == (3, 0, 1)
    assert sum(seen.metrics.time_to_first_token.counts) == 0
    assert seen.generation.timings is not None and seen.generation.timings.decode_throughput is None


def test_a_refused_request_has_no_latency() -> None:
    """Otherwise the median of an overloaded server would be that of its refusals."""
    seen = Observed()
    counts = Counts(3, 0, 0, 0, None)
    end = TokenOut(rid="0", token_ids=[], finish=AbortFinish.of(QueueFull("full")), counts=counts)
    seen.clock.now += 0.001
    seen.generation.push(TextOut(tokens=end, text=""))
    assert (seen.metrics.num_requests, seen.metrics.num_aborted) == (1, 1)
    assert sum(seen.metrics.e2e_request_latency.counts) == 0


def test_a_closed_request_is_an_aborted_one() -> None:
    seen = Observed()
    seen.push(1.0, 1)
    seen.generation.close()
    assert (seen.metrics.num_requests, seen.metrics.num_aborted) == (1, 1)
    assert sum(seen.metrics.queue_time.counts) == 0
    assert (seen.metrics.prompt_tokens, seen.metrics.generation_tokens) == (3, 1)


def test_a_request_that_is_sent_again_has_not_ended() -> None:
    seen = Observed()
    seen.generation.on_queue_full = lambda: None
    seen.push(1.0, 0, AbortFinish.of(QueueFull("full")))
    assert seen.metrics.num_requests == 0
    seen.push(1.0, 1, LengthFinish(1))
    assert seen.metrics.num_requests == 1 and seen.metrics.num_aborted == 0


SECONDS = st.floats(0, 5000)


@given(st.lists(st.tuples(st.sampled_from(["", "ann", "bob", "eve"]), SECONDS, SECONDS, st.booleans())))
def test_the_counts_of_all_tenants_make_the_totals(samples: list[tuple[str, float, float, bool]]) -> None:
    """Two tenants have counts of their own, and all others share theirs."""
    clock = FakeClock()
    metrics = RequestMetrics(clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_metrics, "MAX_TENANTS", 2)
        for tenant, first_s, queue_s, is_aborted in samples:
            one = Observed(metrics, tenant, clock)
            one.push(first_s, 1)
            one.push(1.0, 4, AbortFinish("by the client") if is_aborted else LengthFinish(4), queue_s=queue_s)
    tenants = metrics.tenants
    first = list(dict.fromkeys(tenant for tenant, *_ in samples))[:2]
    assert list(tenants)[:2] == first and set(tenants) - set(first) <= {"other"}
    for tenant in first:
        mine = [sample for sample in samples if sample[0] == tenant]
        assert tenants[tenant].num_requests == len(mine)
        assert tenants[tenant].num_aborted == sum(sample[3] for sample in mine)
        assert tenants[tenant].time_to_first_token.total == pytest.approx(sum(sample[1] for sample in mine))
        assert tenants[tenant].queue_time.total == pytest.approx(sum(sample[2] for sample in mine))
    for name in ("num_requests", "num_aborted", "generation_tokens"):
        assert sum(getattr(one, name) for one in tenants.values()) == getattr(metrics, name)
    for name in ("time_to_first_token", "queue_time"):
        total = dict(getattr(metrics, name).cumulative())
        for bound in dict(getattr(TenantCounts(), name).cumulative()):
            assert sum(dict(getattr(one, name).cumulative())[bound] for one in tenants.values()) == total[bound]


def test_a_tenant_is_known_before_the_engine_has_the_request() -> None:
    seen = Observed(tenant="ann")
    seen.generation.close()
    assert {name: one.num_aborted for name, one in seen.metrics.tenants.items()} == {"ann": 1}


@pytest.mark.parametrize(("num_restarts", "prefill_s"), [(0, 1.5), (1, None)])
def test_a_restart_after_the_first_token_hides_the_time_of_the_prefill(
    num_restarts: int, prefill_s: float | None
) -> None:
    """The queue time at the end is that of the second engine."""
    one = Observed()
    one.generation.first_token_s = 2.0
    one.push(2.0, 1)
    one.generation.num_recoveries += num_restarts
    one.push(1.0, 2, LengthFinish(length=2))
    assert one.generation.timings is not None and one.generation.timings.prefill_time == prefill_s
