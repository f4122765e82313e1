"""/metrics: the state of the engine and the counts of requests, in Prometheus' text format.

The names, labels and buckets are SGLang's, so that existing dashboards and alerts work. `tercet:` begins the names of
metrics that SGLang does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...managers.calls import KnownState
from ...managers.recovery import Recovery
from ...managers.request_metrics import Histogram, RequestMetrics, TenantCounts
from ...managers.tokenizer_manager import TokenizerManager
from ..speculation_state import SpeculationState
from ..tier_state import FileTierState, TierState
from .response_store import ResponseStore

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name",)

_TENANT_COUNTERS: Sequence[tuple[str, str, Callable[[TenantCounts], float]]] = (
    ("num_requests", "Requests that have ended", lambda tenant: tenant.num_requests),
    ("num_aborted_requests", "Requests that were aborted or failed", lambda tenant: tenant.num_aborted),
    ("prefill_tokens", "Prompt tokens computed", lambda tenant: tenant.prefill_tokens),
    ("generation_tokens", "Generated tokens", lambda tenant: tenant.generation_tokens),
)
_TENANT_HISTOGRAMS: Sequence[tuple[str, str, Callable[[TenantCounts], Histogram]]] = (
    (
        "time_to_first_token_seconds",
        "Time from the request to its first token",
        lambda tenant: tenant.time_to_first_token,
    ),
    ("queue_time_seconds", "Time in the waiting queue", lambda tenant: tenant.queue_time),
)


class MetricsPage(Collector):
    """Makes the page of one engine. Nothing is copied before a scrape: the counts are read when the page is made.

    Any thread may make it. The event loop may count between two reads, so a value must not be the difference of two
    counts: it could fall from one page to the next.
    """

    def __init__(
        self, manager: TokenizerManager, metrics: RequestMetrics, responses: ResponseStore | None = None
    ) -> None:
        self._manager = manager
        self._metrics = metrics
        self._responses = responses
        self._label_values = (manager.server_args.model_name,)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> tuple[bytes, str]:
        """The page and its content type.

        It is never in the OpenMetrics format, although Prometheus asks for it: prometheus_client 0.26 writes the names
        of samples with an underscore for the colon there.
        """
        return generate_latest(self._registry), _CONTENT_TYPE

    def describe(self) -> list[Metric]:
        """No names: the registry has this one collector, so no names can clash."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics. Those of the scheduler are missing until it has reported its state."""
        known = self._manager.last_state
        if known is not None:
            yield from self._of_scheduler(known)
        yield from self._of_requests(self._metrics)
        yield from self._of_restarts(self._manager.recovery)
        if self._responses is not None:
            yield from self._of_responses(self._responses)

    def _of_responses(self, stored: ResponseStore) -> Iterator[Metric]:
        own = (
            ("stored_responses", "Stored responses of /v1/responses", len(stored)),
            ("stored_responses_bytes", "Memory of stored responses", stored.num_bytes),
            ("stored_responses_max_bytes", "The most memory of stored responses", stored.max_bytes),
        )
        for name, text, value in own:
            yield self._gauge(name, text, value, prefix="tercet")

    def _of_scheduler(self, known: KnownState) -> Iterator[Metric]:
        state = known.state
        used = state.num_used_tokens
        yield self._gauge("num_running_reqs", "Number of running requests", state.num_running)
        yield self._gauge("num_queue_reqs", "Number of waiting requests", state.num_waiting)
        yield self._gauge("num_used_tokens", "KV slots that running requests hold", used)
        yield self._gauge("max_total_num_tokens", "KV slots of the pool", state.max_total_num_tokens)
        yield self._gauge("token_usage", "Share of KV slots in use", used / max(state.max_total_num_tokens, 1))
        yield self._gauge("cache_hit_rate", "Share of prompt tokens that the prefix cache had", state.cache_hit_rate)
        yield self._gauge(
            "gen_throughput",
            "Generated tokens per second, over the last --decode-log-interval steps; 0 if the engine is idle",
            state.last_gen_throughput,
        )
        yield self._gauge("new_token_ratio", "Share of max_new_tokens reserved", state.new_token_ratio)
        yield self._counter("num_retracted_requests", "Retractions of running requests", state.num_retractions)
        yield self._gauge(
            "num_waiting_uncached_tokens",
            "Prompt tokens that are still to be computed",
            state.num_waiting_uncached_tokens,
            prefix="tercet",
        )
        yield self._gauge(
            "retained_tokens",
            "Tokens of the prefix cache that are retained",
            state.num_retained_tokens,
            prefix="tercet",
        )
        yield self._gauge(
            "saved_states",
            "States of recurrent layers that the prefix cache keeps",
            state.num_saved_states,
            prefix="tercet",
        )
        yield self._gauge("paused", "1 while generation is paused, else 0", state.is_paused, prefix="tercet")
        yield self._gauge(
            "state_age_seconds", "Age of the metrics of the scheduler's state", known.age_s, prefix="tercet"
        )
        yield self._counter("kv_repairs", "Errors found in the KV accounting", state.num_kv_repairs, prefix="tercet")
        args = self._manager.server_args
        if args.enable_lora:
            num_used = self._manager.adapters.num_slots_used
            yield self._gauge("lora_pool_slots_used", "LoRA adapters that are loaded", num_used)
            yield self._gauge("lora_pool_slots_total", "LoRA adapters that may be loaded", args.max_loras or 0)
        if state.tiers is not None:
            yield from self._of_tiers(state.tiers)
        if state.speculation is not None:
            yield from self._of_speculation(state.speculation)

    def _of_speculation(self, drafts: SpeculationState) -> Iterator[Metric]:
        yield self._gauge(
            "spec_accept_length", "Average tokens of a request in a step that verifies its drafts", drafts.accept_length
        )
        yield self._gauge("spec_accept_rate", "Share of drafts that were accepted", drafts.accept_rate)
        yield self._counter("draft_tokens", "Drafts that were verified", drafts.num_drafts, prefix="tercet")
        yield self._counter(
            "accepted_draft_tokens", "Drafts that were accepted", drafts.num_accepted_drafts, prefix="tercet"
        )

    def _of_tiers(self, tiers: TierState) -> Iterator[Metric]:
        yield self._gauge("hicache_host_used_tokens", "Tokens that host memory holds", tiers.host_used_tokens)
        yield self._gauge("hicache_host_total_tokens", "Tokens that host memory can hold", tiers.host_total_tokens)
        yield self._counter("hicache_backup_tokens", "Tokens copied to host memory", tiers.saved_tokens)
        yield self._counter("hicache_backup_bytes", "Bytes copied to host memory", tiers.saved_bytes)
        yield self._counter("load_back_tokens", "Tokens copied back to the KV pool", tiers.loaded_tokens)
        yield self._counter("load_back_bytes", "Bytes copied back to the KV pool", tiers.loaded_bytes)
        yield self._counter("hicache_dropped_tokens", "Tokens removed from host memory", tiers.dropped_tokens)
        if tiers.files is not None:
            yield from self._of_files(tiers.files)

    def _of_files(self, files: FileTierState) -> Iterator[Metric]:
        yield self._counter("prefetched_tokens", "Tokens read from files", files.read_tokens)
        yield self._counter("backuped_tokens", "Tokens written to files", files.written_tokens)
        own = (
            (self._gauge, "kv_files_used_bytes", "Size of the files", files.used_bytes),
            (self._gauge, "kv_files_max_bytes", "The largest size of the files", files.max_bytes),
            (self._gauge, "kv_files_writing", "1, or 0 for a minute after a write has failed", files.is_writing),
            (self._counter, "kv_files_read_bytes", "Bytes read from files", files.read_bytes),
            (self._counter, "kv_files_written_bytes", "Bytes written to files", files.written_bytes),
            (self._counter, "kv_files_damaged", "Damaged files that were removed", files.num_damaged),
            (self._counter, "kv_files_removed", "Files removed to make room", files.num_removed),
        )
        for make, name, text, value in own:
            yield make(name, text, value, prefix="tercet")

    def _of_requests(self, metrics: RequestMetrics) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests", metrics.prompt_tokens)
        yield self._cached_tokens(metrics)
        yield self._counter("generation_tokens", "Generated tokens", metrics.generation_tokens)
        yield self._counter("num_requests", "Requests that have ended", metrics.num_requests)
        yield self._counter("num_aborted_requests", "Requests that were aborted or failed", metrics.num_aborted)
        yield self._histogram(
            "time_to_first_token_seconds", "Time from the request to its first token", metrics.time_to_first_token
        )
        yield self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request", metrics.inter_token_latency
        )
        yield self._histogram(
            "e2e_request_latency_seconds",
            "Time from the request to its end, of those that have begun",
            metrics.e2e_request_latency,
        )
        yield self._histogram("queue_time_seconds", "Time in the waiting queue", metrics.queue_time)
        yield from self._of_tenants(list(metrics.tenants.items()))

    def _of_restarts(self, recovery: Recovery) -> Iterator[Metric]:
        own = (
            ("engine_restarts", "Restarts of the engine", recovery.num_restarts),
            ("resumed_samples", "Samples that continued after a restart, once for each restart", recovery.num_resumed),
            ("fatal_samples", "Samples that ended because the engine died twice on them", recovery.num_fatal),
        )
        for name, text, value in own:
            yield self._counter(name, text, value, prefix="tercet")

    def _cached_tokens(self, metrics: RequestMetrics) -> Metric:
        text = "Prompt tokens that the prefix cache had"
        family = CounterMetricFamily("sglang:cached_tokens", text, labels=(*_LABELS, "cache_source"))
        sources = {
            "device": metrics.device_tokens,
            "host": metrics.host_tokens,
            "storage_files": metrics.storage_tokens,
        }
        for source, count in sources.items():
            family.add_metric((*self._label_values, source), count)
        return family

    def _of_tenants(self, tenants: Sequence[tuple[str, TenantCounts]]) -> Iterator[Metric]:
        labels = (*_LABELS, "tenant")
        for name, text, count_of in _TENANT_COUNTERS:
            counter = CounterMetricFamily(f"tercet:tenant_{name}", text, labels=labels)
            for tenant, counts in tenants:
                counter.add_metric((*self._label_values, tenant), count_of(counts))
            yield counter
        for name, text, histogram_of in _TENANT_HISTOGRAMS:
            family = HistogramMetricFamily(f"tercet:tenant_{name}", text, labels=labels)
            for tenant, counts in tenants:
                histogram = histogram_of(counts)
                family.add_metric((*self._label_values, tenant), histogram.cumulative(), histogram.total)
            yield family

    def _gauge(self, name: str, text: str, value: float, *, prefix: str = "sglang") -> Metric:
        family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, text: str, value: float, *, prefix: str = "sglang") -> Metric:
        """`name` without the ending `_total`, which Prometheus' format adds."""
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"sglang:{name}", text, labels=_LABELS)
        family.add_metric(self._label_values, histogram.cumulative(), histogram.total)
        return family
