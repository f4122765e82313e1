"""OpenTelemetry traces: `--otlp-traces-endpoint`, with the official SDK (the extra `tercet[tracing]`).

Each HTTP request to an endpoint that runs a model is one span. Its parent is the span that the header `traceparent`
names (W3C Trace Context), whose sampling decision it follows. Its children are the phases of its samples: queue,
prefill and decode. The attributes have the names of OpenTelemetry's conventions for generative AI, or vLLM's.

A span is made when its request ends, from times that are measured anyway. A thread of the SDK sends the spans. Its
queue is bounded: if the collector is slow or gone, spans are dropped, and requests are not delayed. The log has a line
about that at most once a minute.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from ... import __version__
from ..server_args import ServerArgs
from .job import Sample
from .routing import ROUTE

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

    from .request_log import RequestRecord

SPAN_NAME = "llm_request"
MAX_SAMPLES = 16
"""Samples of one request whose phases are traced."""
_CLOSE_TIMEOUT_S = 3.0
_LOG_INTERVAL_S = 60.0
_NS = 1_000_000_000
_CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})


class RequestTracer:
    """Makes the spans of requests."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        # Imported here, as in `start`: the SDK is an optional extra.
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("tercet", __version__)
        self._model_name = model_name
        self._propagator = TraceContextTextMapPropagator()
        self._server_kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._context_of = set_span_in_context

    @classmethod
    def start(cls, args: ServerArgs, clock: Callable[[], float] = time.monotonic) -> RequestTracer | None:
        """None without --otlp-traces-endpoint. `clock`: in seconds. Raises ValueError if the packages are missing."""
        if args.otlp_traces_endpoint is None:
            return None
        try:
            # Imported here: the SDK is an optional extra.
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(
                f"--otlp-traces-endpoint needs OpenTelemetry's SDK: pip install 'tercet[tracing]' ({error})"
            ) from None
        logging.getLogger(OTLPSpanExporter.__module__).filters[:] = [_Seldom(clock)]
        ours = Resource({"service.name": "tercet", "service.version": __version__})
        provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=args.otlp_traces_endpoint)))
        return cls(provider, args.model_name)

    def close(self) -> None:
        """Sends what is left. Takes at most a few seconds, even if nobody answers."""
        # A daemon thread, because the SDK may wait longer than the server's end should take.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)

    def record(self, scope: Scope, record: RequestRecord) -> None:
        """Makes the spans of a request that has ended. Requests to other endpoints have none."""
        route = scope.get(ROUTE)
        if route is None:
            return
        wall_ns, now_s = time.time_ns(), time.monotonic()

        def at(monotonic_s: float) -> int:
            return wall_ns - int((now_s - monotonic_s) * _NS)

        span = self._tracer.start_span(
            SPAN_NAME,
            self._parent(scope),
            self._server_kind,
            {
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": record.status,
                "tercet.request_id": record.id.decode(),
                "gen_ai.request.model": self._model_name,
                **_totals(record),
            },
            start_time=at(record.started),
        )
        if span.is_recording():
            if record.status >= 500:
                span.set_status(self._failed)
            context = self._context_of(span)
            for sample in record.samples[:MAX_SAMPLES]:
                self._record_phases(sample, context, at)
        span.end(wall_ns)

    def _parent(self, scope: Scope) -> Context:
        carrier = {
            name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CONTEXT_HEADERS
        }
        return self._propagator.extract(carrier)

    def _record_phases(self, sample: Sample, context: Context, at: Callable[[float], int]) -> None:
        """The phases that the sample has been in. A sample that ended early lacks the later ones."""
        generation = sample.generation
        sent_s, first_s, end_s = generation.submitted_s, generation.first_token_s, generation.finished_s
        queue_s = sample.counts.queue_time_s
        phases = []
        if queue_s is not None:
            phases.append(("queue", 0.0, queue_s))
        if first_s is not None:
            # Without an end, its wait is not known.
            name = "queue and prefill" if queue_s is None else "prefill"
            phases.append((name, min(queue_s or 0.0, first_s), first_s))
            if end_s is not None:
                phases.append(("decode", first_s, end_s))
        for name, start_s, stop_s in phases:
            attributes: dict[str, Any] = {"tercet.sample_index": sample.index}
            if name == "decode":
                attributes["gen_ai.usage.output_tokens"] = sample.counts.completion_tokens
            elif "prefill" in name:
                attributes["gen_ai.usage.input_tokens"] = sample.prompt_tokens
                attributes["tercet.cached_tokens"] = sample.counts.cached_tokens
            child = self._tracer.start_span(name, context, attributes=attributes, start_time=at(sent_s + start_s))
            child.end(at(sent_s + stop_s))


class _Seldom(logging.Filter):
    """Lets a line pass once in a minute: the SDK writes several for each batch while the collector is gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._next_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + _LOG_INTERVAL_S
        return True


def _totals(record: RequestRecord) -> dict[str, Any]:
    """The attributes that are known of all samples together."""
    samples = record.samples
    if not samples:
        return {}
    prompts = {sample.prompt_index: sample.prompt_tokens for sample in samples}
    totals: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "gen_ai.usage.output_tokens": sum(sample.counts.completion_tokens for sample in samples),
        "gen_ai.response.finish_reasons": [_reason(sample) for sample in samples[:MAX_SAMPLES]],
    }
    first_tokens = [one for sample in samples if (one := sample.generation.first_token_s) is not None]
    if first_tokens:
        totals["gen_ai.latency.time_to_first_token"] = min(first_tokens)
    queued = [one for sample in samples if (one := sample.counts.queue_time_s) is not None]
    if queued:
        totals["gen_ai.latency.time_in_queue"] = max(queued)
    return totals


def _reason(sample: Sample) -> str:
    """ "unfinished": the connection ended before the sample."""
    finish = sample.finish
    return "unfinished" if finish is None else str(finish.__struct_config__.tag)
