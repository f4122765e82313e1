"""OpenTelemetry traces: one span for each request, with the phases of its samples."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from breakable_http import Connection
from fake_http import Site

from fakes import FakeClock
from tercet.srt.entrypoints import server, tracing
from tercet.srt.entrypoints.tracing import RequestTracer
from tercet.srt.io_struct import AbortFinish
from tercet.srt.server_args import ServerArgs

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 4}

try:
    import opentelemetry.sdk
except ImportError:
    has_sdk = pytest.mark.skip(reason="OpenTelemetry's SDK is an optional extra (tercet[tracing])")
else:
    has_sdk = pytest.mark.skipif(not opentelemetry.sdk, reason="")


@contextmanager
def traced_site(**settings: Any) -> Iterator[tuple[Site, Any]]:
    """A site, and the exporter that keeps its spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    site = Site(app={"tracer": RequestTracer(provider, "tiny")}, **settings)
    try:
        yield site, exporter
    finally:
        site.close()


def family(exporter: Any) -> tuple[Any, list[Any]]:
    """The one span of a request, and its phases."""
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.name == tracing.SPAN_NAME]
    children = [span for span in spans if span is not root]
    assert all(child.parent.span_id == root.context.span_id for child in children)
    return root, children


@has_sdk
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_its_phases(stream: bool) -> None:
    with traced_site() as (site, exporter):
        site.scheduler.delay_s = 0.01
        answer = site.post("/v1/completions", {**BODY, "n": 2, "stream": stream}, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        root, children = family(exporter)
        assert root.kind.name == "SERVER" and root.parent is None and root.status.is_unset
        assert root.attributes["tercet.request_id"] == "mine"
        assert root.attributes["http.route"] == "/v1/completions"
        assert root.attributes["http.response.status_code"] == 200
        assert root.attributes["gen_ai.usage.input_tokens"] == 3
        assert root.attributes["gen_ai.usage.output_tokens"] == 8
        assert root.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
        assert root.attributes["gen_ai.latency.time_in_queue"] == 0.25
        for index in range(2):
            own = [child for child in children if child.attributes["tercet.sample_index"] == index]
            assert [child.name for child in own] == ["queue", "prefill", "decode"]
            assert all(child.start_time <= child.end_time for child in own)
            assert own[1].end_time == own[2].start_time
            assert root.start_time <= own[0].start_time and own[2].end_time <= root.end_time


@has_sdk
def test_the_parent_is_that_of_the_header() -> None:
    for flags, is_sampled in (("01", True), ("00", False)):
        with traced_site() as (site, exporter):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "a=b"}
            assert site.post("/v1/completions", BODY, headers=headers).status_code == 200
            if not is_sampled:
                assert exporter.get_finished_spans() == ()
                continue
            root, children = family(exporter)
            assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
            assert root.context.trace_state["a"] == "b"
            assert {child.context.trace_id for child in children} == {root.context.trace_id}


@has_sdk
@pytest.mark.parametrize("header", ["", "x", f"00-{'0' * 32}-{PARENT}-01", "ff-" + "é" * 300])
def test_a_broken_header_begins_a_new_trace(header: str) -> None:
    with traced_site() as (site, exporter):
        answer = site.post("/v1/completions", BODY, headers={"traceparent": header.encode("latin-1")})
        assert answer.status_code == 200
        assert family(exporter)[0].parent is None


@has_sdk
def test_refused_and_failed_requests_have_a_span_and_others_have_none() -> None:
    with traced_site() as (site, exporter):
        site.refused("/v1/completions", {**BODY, "top_p": 0})
        root, children = family(exporter)
        assert root.attributes["http.response.status_code"] == 400 and root.status.is_unset and not children
        exporter.clear()
        site.scheduler.fail = (0, AbortFinish("broken", 500, "InvalidLogits"))
        site.refused("/v1/completions", BODY, 500)
        assert family(exporter)[0].status.status_code.name == "ERROR"
        exporter.clear()
        for path in ("/health", "/v1/models", "/nope"):
            site.get(path)
        assert exporter.get_finished_spans() == ()


@has_sdk
def test_a_request_whose_client_leaves_has_a_span() -> None:
    with traced_site() as (site, exporter):

        async def run() -> None:
            site.scheduler.delay_s = 0.005
            connection = Connection(site, "POST", "/generate", {"text": "a", "stream": True})
            while not connection.data:
                await asyncio.sleep(0.001)
            connection.leave()
            await connection.done

        site.run(run())
        root, children = family(exporter)
        assert [child.name for child in children] == ["queue and prefill", "decode"]
        assert root.attributes["gen_ai.usage.output_tokens"] >= 1


@has_sdk
def test_the_number_of_traced_samples_is_bounded() -> None:
    with traced_site() as (site, exporter):
        assert site.post("/v1/completions", {**BODY, "n": 100}).status_code == 200
        assert len(family(exporter)[1]) == 3 * tracing.MAX_SAMPLES


@has_sdk
def test_spans_reach_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            data = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
            tracer = RequestTracer.start(ServerArgs(model_path="m", served_model_name="tiny", otlp_traces_endpoint=url))
            assert tracer is not None
            site = Site(app={"tracer": tracer})
            site.good("/v1/completions", BODY)
            site.close()
            tracer.close()
        finally:
            collector.shutdown()
            thread.join()
    (resource,) = received[0].resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "tercet"
    spans = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert spans == {tracing.SPAN_NAME, "queue", "prefill", "decode"}


def test_without_the_package_the_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [one for one in sys.modules if one.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    args = ServerArgs(model_path="m", otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
    with pytest.raises(ValueError, match=r"pip install 'tercet\[tracing\]'"):
        RequestTracer.start(args)
    assert RequestTracer.start(ServerArgs(model_path="m")) is None
    monkeypatch.setattr(server.log, "configure", lambda *_: None)
    assert server.serve(args) == 1, "it ends before it starts the engine"


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:4318", "http://", "http:///v1/traces", "http://:4318", "http://[x", "http://a:99999", "http://a:b"],
)
def test_the_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--otlp-traces-endpoint"):
        ServerArgs(model_path="m", otlp_traces_endpoint=endpoint)


@has_sdk
def test_a_collector_that_is_gone_costs_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    args = ServerArgs(model_path="m", otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    tracer = RequestTracer.start(args, clock)
    assert tracer is not None
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    lines = []
    for later_s in (0.0, 0.1, 58.0, 2.0, 1.0, 90.0):
        clock.now += later_s
        caplog.clear()
        exporter.warning("Failed to export")
        lines.append(len(caplog.records))
    tracer.close()
    assert lines == [1, 0, 0, 1, 0, 1]
