"""What is sent to each kind of server, and how its answers are understood, shape by shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from scripted_http import Exchange, scripted_server, sse

from tercet.benchmarks.backends import BACKENDS, Dialect, EventSplitter, Output, RequestSettings, error_text
from tercet.benchmarks.http_client import HttpClient
from tercet.benchmarks.workloads import Request

ASK = Request("hello", 5, 7)
ALL = sorted(BACKENDS)
CHATS = ["sglang-oai-chat", "vllm-chat"]
COMPLETIONS = ["sglang-oai", "vllm"]
NATIVE = ["tercet", "sglang"]


def dialect(backend: str, **settings: Any) -> Dialect[Any]:
    return BACKENDS[backend].dialect(RequestSettings(**settings))


def send(speaks: Dialect[Any], script: Any) -> tuple[Output, Exchange]:
    async def work(url: str) -> Output:
        client = HttpClient(url)
        output = await asyncio.wait_for(speaks.send(client, speaks.encode(ASK)), PATIENCE_S)
        await client.close()
        return output

    with scripted_server(script) as server:
        return asyncio.run(work(server.url)), server.seen[0]


def streamed(speaks: Dialect[Any], events: Sequence[Any], done: bool = True) -> Output:
    async def script(exchange: Exchange) -> None:
        await exchange.stream(events, done)

    return send(speaks, script)[0]


def native(text: str, tokens: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 5, "completion_tokens": tokens, "cached_tokens": 2}
    return {"text": text, "output_ids": [1] * tokens, "meta_info": {**counts, "finish_reason": finish, **meta}}


def chunk(text: str | None = None, finish: str | None = None, usage: Any = None, **more: Any) -> dict[str, Any]:
    choices = [] if text is None and finish is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return {"id": "x", "object": "text_completion", "choices": choices, "usage": usage, **more}


def said(content: str | None = None, finish: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    if content is not None:
        delta["content"] = content
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
LENGTH = {"type": "length", "length": 4}


@pytest.mark.parametrize("backend", NATIVE)
def test_the_native_request(backend: str) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 7, "ignore_eos": True}
    assert dialect(backend).body(ASK) == {"text": "hello", "sampling_params": sampling, "stream": True}
    by_ids = dialect(backend, stream=False, ignore_eos=False, temperature=0.5).body(Request([3, 4], 2, 1))
    sampling = {"temperature": 0.5, "max_new_tokens": 1, "ignore_eos": False}
    assert by_ids == {"input_ids": [3, 4], "sampling_params": sampling, "stream": False}


@pytest.mark.parametrize("backend", COMPLETIONS + CHATS)
def test_the_openai_request(backend: str) -> None:
    common = {"model": "m", "temperature": 0.0, "ignore_eos": True}
    if backend in CHATS:
        own: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 7}
    else:
        own = {"prompt": "hello", "max_tokens": 7}
    whole = {**own, **common, "stream": True, "stream_options": {"include_usage": True}}
    assert dialect(backend, model="m").body(ASK) == whole
    assert dialect(backend, model="m", stream=False).body(ASK) == {**own, **common, "stream": False}


def test_extra_fields_are_merged_into_objects_and_replace_the_rest() -> None:
    extra = {"sampling_params": {"top_k": 5, "temperature": 1}, "rid": "r"}
    body = json.loads(dialect("tercet", extra=extra).encode(ASK))
    assert body["rid"] == "r"
    sampling = {"temperature": 1, "max_new_tokens": 7, "ignore_eos": True, "top_k": 5}
    assert body["sampling_params"] == sampling
    body = json.loads(dialect("vllm", extra={"max_tokens": 3, "top_p": 0.5}).encode(ASK))
    assert (body["max_tokens"], body["top_p"], body["prompt"]) == (3, 0.5, "hello")


def test_a_native_stream_tells_tokens_by_chunk() -> None:
    events = [native("a", 1), native("a", 1), native("abc", 3), native("abcd", 4, LENGTH)]
    output = streamed(dialect("tercet"), events)
    assert output.error is None and output.text == "abcd"
    assert output.counts == [1, 2, 1] and len(output.arrivals) == 3
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (5, 4, 2)
    assert output.start_s < output.arrivals[0] <= output.arrivals[-1] <= output.end_s


def test_a_native_stream_of_what_is_new() -> None:
    events = [native("a", 1), native("bc", 3), native("d", 4, LENGTH)]
    output = streamed(dialect("tercet", incremental=True), events)
    assert (output.text, output.counts, output.completion_tokens) == ("abcd", [1, 2, 1], 4)


@pytest.mark.parametrize("backend", COMPLETIONS)
@pytest.mark.parametrize("place", ["own chunk", "last chunk", "every chunk", "nowhere"])
def test_usage_counts_wherever_it_stands(backend: str, place: str) -> None:
    every = place == "every chunk"
    usages = [{**USAGE, "completion_tokens": i} if every else None for i in (1, 3)]
    events = [chunk("a", usage=usages[0]), chunk("bc", usage=usages[1])]
    events += [chunk("d", "length", usage=USAGE if place in ("last chunk", "every chunk") else None)]
    if place == "own chunk":
        events.append(chunk(usage=USAGE))
    output = streamed(dialect(backend), events)
    assert output.error is None
    assert output.texts == ["a", "bc", "d"] and len(output.arrivals) == 3 and output.counts == []
    told = None if place == "nowhere" else 4
    assert (output.completion_tokens, output.cached_tokens) == (told, told and 3)


def test_a_token_without_text_is_a_token_and_a_finish_is_none() -> None:
    output = streamed(dialect("vllm"), [chunk(""), chunk("a"), chunk("", "stop"), chunk(usage=USAGE)])
    assert output.texts == ["", "a"] and len(output.arrivals) == 2
    only = streamed(dialect("vllm"), [chunk("", "length"), chunk(usage={**USAGE, "completion_tokens": 1})])
    assert only.error is None and len(only.arrivals) == 1  # all it said had no text


@pytest.mark.parametrize("backend", CHATS)
def test_a_chat_stream(backend: str) -> None:
    events = [
        said("", role="assistant"),
        said(reasoning_content="hm "),
        said("a"),
        said("b", reasoning_content=None),
        said(finish="stop"),
        {"choices": [], "usage": USAGE},
    ]
    output = streamed(dialect(backend), events)
    assert output.error is None
    assert output.texts == ["hm ", "a", "b"] and len(output.arrivals) == 3
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (5, 4, 3)


def test_the_role_is_not_the_first_token() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(said("", role="assistant"))
        await asyncio.sleep(0.1)
        await exchange.event(said("a"))
        await exchange.event(said(finish="stop"))
        await exchange.piece(b"data: [DONE]\n\n")
        await exchange.piece(b"")

    output, _ = send(dialect("vllm-chat"), script)
    assert output.arrivals[0] - output.start_s >= 0.1


@pytest.mark.parametrize("backend", ALL)
def test_a_whole_answer(backend: str) -> None:
    message = {"role": "assistant", "content": "abcd"}
    answers = {
        "/generate": native("abcd", 4, LENGTH),
        "/v1/completions": chunk("abcd", "length", usage=USAGE),
        "/v1/chat/completions": {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": USAGE,
        },
    }

    async def script(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)
        await exchange.answer(answers[exchange.path])

    output, exchange = send(dialect(backend, stream=False), script)
    assert exchange.json["stream"] is False
    assert output.error is None
    assert (output.text, output.completion_tokens, output.arrivals) == ("abcd", 4, [])
    assert output.latency_s >= 0.05


FAILURES: list[tuple[str, list[Any], str]] = [
    ("tercet", [native("a", 1), {"error": {"message": "out of memory"}}], "out of memory"),
    ("tercet", [native("a", 1, {"type": "abort", "message": "queue"})], "aborted: queue"),
    ("tercet", [native("a", 1)], "the stream ended before the answer was complete"),
    ("tercet", [{"text": "a"}], "an event without meta_info"),
    ("tercet", [{**native("", 1, LENGTH), "text": None}], "Expected `str`, got `null`"),
    ("vllm", [chunk("a"), {"error": {"message": "engine died", "code": 500}}], "engine died"),
    ("vllm", [{"object": "error", "message": "old style"}], "old style"),
    ("vllm", [{"error": "just text"}], "just text"),
    ("vllm", [chunk("a", "abort")], "the server ended the answer with finish_reason 'abort'"),
    ("vllm", [chunk("a")], "the stream ended before the answer was complete"),
    ("vllm", [[1, 2]], "cannot read [1, 2]"),
    ("vllm-chat", [said("", role="assistant")], "the stream ended before the answer was complete"),
    ("vllm-chat", [said("", role="assistant"), said(finish="stop")], "the answer has no token"),
]


@pytest.mark.parametrize("backend, events, message", FAILURES)
def test_failures_in_a_stream(backend: str, events: list[Any], message: str) -> None:
    output = streamed(dialect(backend), events, done="no token" in message)
    assert output.error is not None and message in output.error
    assert output.end_s >= output.start_s > 0


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal(backend: str, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "queue full", "code": "x"}}, "503 Service Unavailable")

    output, _ = send(dialect(backend, stream=stream), script)
    assert output.error == "503 Service Unavailable: queue full"


@pytest.mark.parametrize("backend", ALL)
def test_a_server_that_dies_in_the_middle(backend: str) -> None:
    first = {"/generate": native("a", 1), "/v1/completions": chunk("a"), "/v1/chat/completions": said("a")}

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(first[exchange.path])
        await asyncio.sleep(0.05)
        exchange.hang_up()

    output, _ = send(dialect(backend), script)
    assert output.error is not None and "the connection broke in the middle of the answer" in output.error
    assert len(output.arrivals) == 1


EVENTS = [b'{"a":1}', b"[DONE]", b"x: y", "é\u2028".encode()]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.data())
def test_events_may_be_cut_anywhere(events: list[bytes], newline: bytes, data: st.DataObject) -> None:
    wire = b"".join(b"data: " + one + newline + newline for one in events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    splitter = EventSplitter()
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += splitter.feed(wire[start:end])
    assert found == events


def test_events_in_the_standard_s_other_forms() -> None:
    wire = b": comment\n\nevent: e\nid: 3\ndata:no space\n\ndata: {\ndata: }\n\n\n\ndata: unfinished"
    assert EventSplitter().feed(wire) == [b"no space", b"{\n}"]
    assert EventSplitter().feed(sse({"a": 1})) == [b'{"a": 1}']


@pytest.mark.parametrize(
    "body, text",
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": [{"msg": "m"}]}', '[{"msg": "m"}]'),
        (b'{"message": "m"}', "m"),
        (b"plain", "plain"),
        (b"\xff", "\ufffd"),
        (b"{}", "{}"),
        (b"x" * 600, "x" * 500 + "..."),
        (b"[" * 50_000, "[" * 500 + "..."),  # too deep for Python's JSON
    ],
)
def test_what_a_failed_answer_says(body: bytes, text: str) -> None:
    assert error_text(body) == text
