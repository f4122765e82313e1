"""Streams that are continued after a broken connection: nothing is lost, repeated or given to others."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from breakable_http import Connection, events_in
from fake_http import Site, error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from live_site import live_site

from tercet.srt.entrypoints import resumable
from tercet.srt.entrypoints.routing import BoundEndpoint
from tercet.srt.server_args import ServerArgs

CHAT = {"messages": [{"role": "user", "content": "a"}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "abc", "max_tokens": 12}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 12, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 12, "n": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 12}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 12}}),
]


def said(events: list[tuple[bytes, bytes]]) -> dict[Any, str]:
    """What the events say, however they divide it: the text of each answer, and the kinds of other events."""
    texts: dict[Any, str] = defaultdict(str)
    for _, rest in events:
        *_, line = rest.decode().split("\n")
        if line == "data: [DONE]":
            texts["end"] += line
            continue
        one = json.loads(line[6:])
        if "meta_info" in one:  # each event has the text so far
            texts[0] = one["text"] + str(one["output_ids"]) + str(one["meta_info"]["finish_reason"])
        elif "type" in one and one["type"].endswith("delta"):
            texts[one["type"]] += one["delta"]
        elif "type" in one:
            texts["kinds"] += one["type"]
        for choice in one.get("choices", ()):
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts["finish", choice["index"]] += str(choice["finish_reason"] or "")
        if not one.get("choices", True):
            texts["usage"] += str(one["usage"])
    return texts


def make_site(grace_s: float = 60.0, **settings: Any) -> Site:
    return Site(resume_grace=grace_s, **settings)


def streams_of(site: Site) -> resumable.ResumableStreams:
    streams = next(route.app.server.streams for route in site.app.routes if isinstance(route.app, BoundEndpoint))
    assert streams is not None
    return streams


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_stream_that_breaks_everywhere_is_whole(path: str, body: dict[str, Any]) -> None:
    site = make_site()

    async def run() -> None:
        whole = Connection(site, "POST", path, {**body, "stream": True})
        await whole.done
        expected = events_in(whole.data)
        assert [int(name.partition(b"/")[2]) for name, _ in expected] == list(range(1, len(expected) + 1))
        connection = Connection(site, "POST", path, {**body, "stream": True})
        got: list[tuple[bytes, bytes]] = []
        while not got or got[-1][1] != b"data: [DONE]":
            got += await connection.break_after(1)
            connection = Connection(site, "GET", "/v1/streams", last_event_id=got[-1][0].decode())
        await connection.done
        assert connection.status == 200 and connection.data == b"", "nothing comes after the end"
        assert said(got) == said(expected)
        assert not site.scheduler.aborted and site.idle()

    site.run(run())
    site.close()


@given(cuts=st.lists(st.integers(0, 4), max_size=8), gated=st.booleans())
@settings(deadline=None, max_examples=25)
def test_any_breaks_at_any_pace(cuts: list[int], gated: bool) -> None:
    site = make_site()
    site.scheduler.gate = gated

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "abc", "max_tokens": 20, "stream": True})

        async def release() -> None:
            while True:
                if site.scheduler.held:
                    site.scheduler.release()
                await asyncio.sleep(0)

        releasing = asyncio.create_task(release())
        await connection.begun()
        last = connection.headers[b"x-stream-id"].decode() + "/0"
        got: list[tuple[bytes, bytes]] = []
        for cut in cuts:
            if got and got[-1][1] == b"data: [DONE]":
                break
            await connection.has(cut)
            connection.leave()
            new = events_in(connection.data)[:cut]
            got += new
            last = new[-1][0].decode() if new else last
            connection = Connection(site, "GET", "/v1/streams", last_event_id=last)
            await connection.begun()
        await connection.done
        got += events_in(connection.data)
        releasing.cancel()
        text = "".join(json.loads(rest[6:])["choices"][0]["text"] for _, rest in got if b"[DONE]" not in rest)
        ids = [int(name.partition(b"/")[2]) for name, _ in got]
        assert ids == list(range(1, len(ids) + 1))
        assert text == "".join(site.scheduler.words[i % len(site.scheduler.words)] for i in range(20))

    site.run(run())
    site.close()


@pytest.mark.parametrize("reset", [False, True])
def test_over_a_real_socket_that_breaks(reset: bool) -> None:
    body = {"prompt": "a", "max_tokens": 60, "stream": True}
    with live_site(resume_grace=60.0) as live:
        live.scheduler.delay_s = 0.005
        connection = live.send("POST", "/v1/completions", body)
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(65536)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        last = re.findall(rb"id: (\S+)\ndata: .*\n\n", received)[-1].decode()
        rest = httpx.get(f"{live.url}/v1/streams", headers={"last-event-id": last})
        assert rest.status_code == 200 and rest.headers["content-type"].startswith("text/event-stream")
        numbers = [int(number) for number in re.findall(rb"id: \w+/(\d+)\n", rest.content)]
        assert numbers[0] == int(last.partition("/")[2]) + 1 and numbers == sorted(set(numbers))
        assert rest.content.endswith(b"data: [DONE]\n\n")
        assert not live.scheduler.aborted and live.manager.num_unfinished == 0


def test_after_the_grace_time_the_request_ends() -> None:
    site = make_site(grace_s=0.05)
    site.scheduler.gate = True

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 50, "stream": True})
        while not site.scheduler.held:
            await asyncio.sleep(0)
        site.scheduler.release()
        (event,) = await connection.break_after(1)
        assert site.scheduler.running and not site.scheduler.aborted, "it goes on without its client"
        while site.scheduler.running:
            await asyncio.sleep(0.005)
        assert len(site.scheduler.aborted) == 1
        late = Connection(site, "GET", "/v1/streams", last_event_id=event[0].decode())
        await late.done
        assert late.status == 404 and b"stream_not_found" in late.data
        assert site.idle()

    site.run(run())
    site.close()


def test_a_client_that_leaves_before_the_first_event_ends_its_request() -> None:
    """It cannot know the name of the stream."""
    site = make_site()
    site.scheduler.mute = True

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "a", "stream": True})
        while not site.scheduler.running:
            await asyncio.sleep(0)
        connection.leave()
        await connection.done
        assert site.idle()

    site.run(run())
    site.close()


def test_only_the_same_key_continues_a_stream() -> None:
    site = make_site(api_key=["sesame", "pomegranate"])
    site.scheduler.gate = True

    async def run() -> None:
        own, other = "Bearer sesame", "Bearer pomegranate"
        body = {"prompt": "a", "max_tokens": 50, "stream": True}
        connection = Connection(site, "POST", "/v1/completions", body, authorization=own)
        while not site.scheduler.held:
            await asyncio.sleep(0)
        site.scheduler.release()
        (event,) = await connection.break_after(1)
        name = event[0].decode()
        for headers, status in (({"authorization": other}, 404), ({}, 401)):
            thief = Connection(site, "GET", "/v1/streams", last_event_id=name, **headers)
            await thief.done
            assert thief.status == status and b"data:" not in thief.data
        again = Connection(site, "GET", "/v1/streams", last_event_id=name, authorization=own)
        await again.begun()
        again.leave()
        await again.done

    site.run(run())
    site.close()


def test_a_new_connection_takes_the_stream_from_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may not have noticed that the old one is dead."""
    monkeypatch.setattr(resumable, "MAX_DETACHED", 0)  # the stream is never without a client
    site = make_site()
    site.scheduler.gate = True

    async def run() -> None:
        old = Connection(site, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 6, "stream": True})
        while not site.scheduler.held:
            await asyncio.sleep(0)
        site.scheduler.release()
        await old.has(1)
        name = events_in(old.data)[0][0].decode()
        head = Connection(site, "HEAD", "/v1/streams", last_event_id=name)
        await asyncio.wait_for(head.done, 10)
        assert head.data == b"" and not old.done.done(), "only tells that there is such a stream"
        beyond = Connection(site, "HEAD", "/v1/streams", last_event_id=f"{name.partition('/')[0]}/999")
        await asyncio.wait_for(beyond.done, 10)
        assert (head.status, beyond.status) == (200, 400)
        new = Connection(site, "GET", "/v1/streams", last_event_id=name)
        await new.begun()
        await old.done
        site.scheduler.gate = False
        site.scheduler.release()
        old.leave()
        await new.done
        assert new.data.endswith(b"data: [DONE]\n\n") and old.data.count(b"\n\n") == 1

    site.run(run())
    site.close()


def test_memory_without_a_client_is_bounded_and_the_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 2000)
    site = make_site()

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 200, "stream": True})
        (event,) = await connection.break_after(1)
        while site.scheduler.running:
            await asyncio.sleep(0)
        (stream,) = streams_of(site)._streams.values()
        assert stream.num_bytes < 2000 + 1000
        again = Connection(site, "GET", "/v1/streams", last_event_id=event[0].decode())
        await again.done
        events = [event, *events_in(again.data)]
        text = "".join(json.loads(rest[6:])["choices"][0]["text"] for _, rest in events if b"[DONE]" not in rest)
        assert text == "".join(site.scheduler.words[i % len(site.scheduler.words)] for i in range(200))
        assert len(events) < 100, "the outputs that nobody read were merged"

    site.run(run())
    site.close()


def test_old_events_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 1000)
    site = make_site()

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 50, "stream": True})
        await connection.done
        first, *_, last = events_in(connection.data)
        stale = Connection(site, "GET", "/v1/streams", last_event_id=first[0].decode())
        await stale.done
        assert stale.status == 410 and b"stream_gone" in stale.data
        fresh = Connection(site, "GET", "/v1/streams", last_event_id=last[0].decode())
        await fresh.done
        assert fresh.status == 200

    site.run(run())
    site.close()


def test_events_that_a_new_connection_will_read_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another event comes before it reads the first one."""
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 250)

    async def run() -> None:
        given: asyncio.Queue[bytes] = asyncio.Queue()

        async def source() -> AsyncGenerator[bytes, None]:
            while True:
                yield await given.get()

        stream = resumable.ResumableStreams(60.0).open("s", "", b"", source(), lambda: None)
        parts = stream.attach(0).parts()
        for number in range(5):
            given.put_nowait(b"data: %d\n\n" % number)
            await anext(parts)
        waiting = asyncio.create_task(anext(parts, None))
        for _ in range(10):
            await asyncio.sleep(0)  # the stream has sent everything, and waits for its source
        again = stream.attach(0)
        given.put_nowait(b"data: 5\n\n")
        for _ in range(10):
            await asyncio.sleep(0)
        assert stream.last == 6 and await waiting is None
        data = await anext(again.parts())
        assert [rest for _, rest in events_in(data)] == [b"data: %d" % number for number in range(6)]
        again.leave()
        stream.end()

    asyncio.run(run())


def test_the_number_and_the_size_of_streams_without_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_DETACHED", 3)
    monkeypatch.setattr(resumable, "MAX_HELD_BYTES", 20_000)
    site = make_site()

    async def run() -> None:
        body = {"prompt": "a", "max_tokens": 30, "stream": True}
        for _ in range(10):
            connection = Connection(site, "POST", "/v1/completions", body)
            await connection.done
            assert len(streams_of(site)) <= 3 and streams_of(site).num_held_bytes <= 20_000
        site.scheduler.gate = True
        unfinished = []
        for _ in range(5):
            connection = Connection(site, "POST", "/v1/completions", {**body, "max_tokens": 200})
            while not connection.data:
                for _ in range(len(site.scheduler.held)):
                    site.scheduler.release()
                await asyncio.sleep(0)
            unfinished += await connection.break_after(1)
        await asyncio.sleep(0)
        assert len(streams_of(site)) == 3 and len(site.scheduler.aborted) == 2, "ended ones go first, then the oldest"
        oldest = Connection(site, "GET", "/v1/streams", last_event_id=unfinished[0][0].decode())
        await oldest.done
        assert oldest.status == 404

    site.run(run())
    site.close()


@pytest.mark.parametrize("name", ["", "x", "x/", "x/-1", "x/1e3", f"x/{'9' * 30}", "x/²"])
def test_a_header_that_is_no_event(name: str) -> None:
    site = make_site()
    answer = site.get("/v1/streams", headers={"last-event-id": name.encode()})
    assert answer.status_code == 400 and error_of(answer)["param"] == "Last-Event-ID"
    assert site.get("/v1/streams").status_code == 400
    site.close()


def test_an_event_that_does_not_exist_yet() -> None:
    site = make_site()
    stream_id = site.post("/generate", {"text": "a", "stream": True}).headers["x-stream-id"]
    answer = site.get("/v1/streams", headers={"last-event-id": f"{stream_id}/999999"})
    assert answer.status_code == 400 and error_of(answer)["param"] == "Last-Event-ID"
    site.close()


def test_without_the_flag_there_are_no_ids() -> None:
    site = Site()
    answer = site.post("/generate", {"text": "a", "stream": True})
    assert b"id: " not in answer.content and "x-stream-id" not in answer.headers
    assert error_of(site.get("/v1/streams", headers={"last-event-id": "x/1"}))["code"] == "resume_off"
    site.close()


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_the_grace_time_is_a_number_of_seconds(value: float) -> None:
    with pytest.raises(ValueError, match="--resume-grace"):
        ServerArgs(model_path="m", resume_grace=value)
