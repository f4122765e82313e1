"""What a large body costs the others: it is decoded and worked on in threads, after its limits were checked."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fake_http import Site, error_of
from starlette.requests import Request
from starlette.types import ASGIApp

from tercet.srt.entrypoints import routing
from tercet.srt.entrypoints.json_limits import MAX_STRINGS
from tercet.srt.entrypoints.routing import (
    SMALL_BODY_BYTES,
    BoundEndpoint,
    Endpoint,
    Server,
    in_thread_if_large,
    json_response,
)
from tercet.srt.entrypoints.wire import BodyCodec, Wire, doc
from tercet.srt.text.tokenizer import Tokenizer

LONG = "x" * SMALL_BODY_BYTES


class AnyBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    value: Annotated[Any, doc("Whatever")] = None


class WatchedCodec(BodyCodec[AnyBody]):
    """Notes the thread of every decoding."""

    def __init__(self) -> None:
        super().__init__(AnyBody)
        self.threads: list[str] = []

    def decode(self, body: bytes | bytearray) -> AnyBody:
        self.threads.append(threading.current_thread().name)
        return super().decode(body)


@pytest.fixture
def codec(site: Site) -> WatchedCodec:
    """Decodes the bodies of /any, whose answer is the thread that its handler's work was done in."""
    codec = WatchedCodec()

    async def handler(server: Server, request: Request, body: Any) -> ASGIApp:
        return json_response(await in_thread_if_large(request, lambda: threading.current_thread().name))

    endpoint = Endpoint(("POST",), "/any", "", handler, body=codec)
    site.app.router.add_route("/any", BoundEndpoint(endpoint, Server(site.manager, "")), methods=["POST"])
    return codec


def test_a_small_body_stays_in_the_loop(site: Site, codec: WatchedCodec) -> None:
    here = threading.current_thread().name
    assert site.good("/any", {"value": "x"}) == here
    assert codec.threads == [here]


def test_a_large_body_is_decoded_in_the_one_thread_for_that(site: Site, codec: WatchedCodec) -> None:
    async def several() -> list[httpx.Response]:
        return await asyncio.gather(*[site.client.post("/any", json={"value": LONG}) for _ in range(3)])

    for answer in site.run(several()):
        assert answer.status_code == 200 and answer.json() != threading.current_thread().name
    assert codec.threads == ["body-decoder_0"] * 3


def test_what_exceeds_the_limits_is_not_decoded(site: Site, codec: WatchedCodec) -> None:
    error = site.refused("/any", {"value": [""] * (MAX_STRINGS + 1)})
    assert error["message"] == f"the body must have at most {MAX_STRINGS} strings"
    assert codec.threads == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": ["a"] * 1025, "sampling_params": [{}] * 1025}, "text"),
        ("/generate", {"input_ids": [[1]] * 1025, "sampling_params": [{}] * 1025}, "input_ids"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt"),
        ("/v1/completions", {"prompt": [[1]] * 1025}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt"),
        ("/detokenize", {"tokens": [[1]] * 1025}, "tokens"),
    ],
)
def test_too_many_prompts_are_refused_before_anything_is_made_of_each(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    made: list[Any] = []
    make = site.manager.inputs.make_sampling
    monkeypatch.setattr(site.manager.inputs, "make_sampling", lambda given: made.append(given) or make(given))
    error = site.refused(path, body)
    assert error["message"] == f"{param} must have at most 1024 prompts, got 1025" and error["param"] == param
    assert len(made) <= 1


class WatchedTokenizer:
    """A tokenizer that notes the thread of everything that is asked of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.threads: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        self.threads.append(threading.current_thread())
        return getattr(self._tokenizer, name)


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"messages": [{**HI, "name": LONG}]}),
        ("/v1/chat/completions", {"messages": [{**HI, "reasoning_content": LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
        ("/v1/chat/completions", {"messages": [HI], "chat_template_kwargs": {"mood": LONG}}),
        ("/v1/chat/completions", {"messages": [HI], "chat_template_kwargs": {"mood": {"a": [{"b": LONG}]}}}),
        ("/v1/chat/completions", {"messages": [HI] * 4000}),
        ("/tokenize", {"messages": [{**HI, "reasoning_content": LONG}]}),
        ("/detokenize", {"tokens": [1] * SMALL_BODY_BYTES}),
    ],
    ids=["content", "name", "reasoning", "part", "kwargs", "nested kwargs", "messages", "tokenize", "detokenize"],
)
def test_a_large_chat_is_rendered_in_a_thread(site: Site, path: str, body: dict[str, Any]) -> None:
    tokenizer = WatchedTokenizer(site.manager.inputs.tokenizer)
    site.manager.inputs.tokenizer = tokenizer  # type: ignore[assignment]
    site.post(path, body)  # most are refused: longer than the context
    assert tokenizer.threads and tokenizer.threads[0] is not threading.current_thread()
    tokenizer.threads.clear()
    small = {"tokens": [1]} if "tokens" in body else {"messages": [HI], "chat_template_kwargs": {"mood": "!"}}
    site.good(path, small)
    assert set(tokenizer.threads) == {threading.current_thread()}


def test_bodies_share_a_budget_of_memory(site: Site, codec: WatchedCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_HELD_BYTES", 1000)
    good = json.dumps({"value": "x" * 300}).encode()

    async def several() -> list[httpx.Response]:
        others_came = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield good
            await others_came.wait()

        first = [asyncio.create_task(site.client.post("/any", content=slow())) for _ in range(3)]
        for _ in range(100):
            await asyncio.sleep(0)
        refused = await site.client.post("/any", content=good)
        others_came.set()
        return [refused, *await asyncio.gather(*first), await site.client.post("/any", content=good)]

    refused, *rest = site.run(several())
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "exceed the server's memory limit" in error_of(refused)["message"]
    assert [one.status_code for one in rest] == [200] * 4


def test_a_body_counts_until_its_request_is_answered(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages, texts and token ids of requests that wait in the engine take memory, too."""
    monkeypatch.setattr(routing, "MAX_HELD_BYTES", 1000)
    body = b'{"text": "a", "sampling_params": {"max_new_tokens": 2}}'.ljust(600)

    async def several() -> list[httpx.Response]:
        site.scheduler.gate, site.scheduler.step = True, 64
        first = asyncio.create_task(site.client.post("/generate", content=body))
        while not site.scheduler.held:
            await asyncio.sleep(0)
        refused = await site.client.post("/generate", content=body)
        site.scheduler.gate = False
        site.scheduler.release()
        return [refused, await first, await site.client.post("/generate", content=body)]

    assert [one.status_code for one in site.run(several())] == [503, 200, 200]


@pytest.mark.parametrize(
    "fields",
    [
        '"documents": [DEEP], "chat_template_kwargs": {"documents": [DEEP]}',
        '"documents": [DEEP], "chat_template_kwargs": {"documents": DEEP}',
        '"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": DEEP}',
    ],
)
def test_a_value_with_more_levels_than_the_loop_has_room_for_is_no_failure(site: Site, fields: str) -> None:
    """The thread that decodes a large body has room for about as many levels as Python's limit."""
    text = f'{{"messages": [{{"role": "user", "content": "a"}}], {fields}}}{" " * SMALL_BODY_BYTES}'
    limit = sys.getrecursionlimit()
    for depth in range(limit - 200, limit):
        deep = '{"a":' * depth + "1" + "}" * depth
        answer = site.post("/v1/chat/completions", text.replace("DEEP", deep).encode())
        refused = answer.status_code == 400 and ("too deeply" in answer.text or "must be equal" in answer.text)
        assert answer.status_code == 200 or refused, f"{depth}: {answer.text}"
    assert refused, "more levels than the thread has room for"
