"""The client that goes on at the next process of a server gets each event once, and sees what is wrong about one."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from endurance.answers import Incomplete
from endurance.cases import Case
from endurance.continuing import ContinuingClient
from endurance.tally import StreamRecord, Tally
from patience import PATIENCE_S

from tercet.benchmarks.http_client import HttpError, Response

CASE = Case("greedy", "POST", "/generate", {"text": "a"}, can_stream=True)
EVENTS = [b"id: s/%d\ndata: %d\n\n" % (number, number) for number in range(1, 6)] + [b"id: s/6\ndata: [DONE]\n\n"]
DOWN = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
Answer = Callable[[int], bytes]
"""The bytes of one connection, from the number of the last event that the client names."""


def chunked(data: bytes, *, is_whole: bool) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if is_whole else b"")


def events(upto: int, *, whole: bool = False) -> Answer:
    """The events up to this one, and a part of the next one unless it is the last."""
    return lambda after: chunked(b"".join(EVENTS[after:upto]) + (b"" if whole else b"id: s/"), is_whole=whole)


async def exchanged(
    answers: Sequence[Answer], record: StreamRecord, tally: Tally, *, streamed: bool, changes: bool, seed: int
) -> Response:
    """One request to a server that gives these answers. After each one, another process takes its place."""
    server = types.SimpleNamespace(num_changes=0, is_changing=False, url="")
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        after = int(head.partition(b"Last-Event-ID: s/")[2].partition(b"\r\n")[0] or 0)
        assert head.startswith(b"GET /v1/streams " if b"Last-Event-ID" in head else b"POST /generate ")
        server.num_changes += changes
        writer.write(left.pop(0)(after))
        await writer.drain()
        writer.close()

    async with asyncio.timeout(PATIENCE_S), await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        client: Any = ContinuingClient(server, tally, {}, random.Random(seed))  # type: ignore[arg-type]
        try:
            return await client._exchange(CASE, streamed, record)
        finally:
            await client.close()
            assert not left


def run(
    answers: Sequence[Answer], *, streamed: bool = True, changes: bool = True, seed: int = 0
) -> tuple[Response, StreamRecord, Tally]:
    record, tally = StreamRecord("a"), Tally()
    work = exchanged(answers, record, tally, streamed=streamed, changes=changes, seed=seed)
    return asyncio.run(work), record, tally


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("endurance.continuing._RETRY_S", 0.0)


@pytest.mark.parametrize(
    "answers",
    [
        [events(2), events(4), events(6, whole=True)],
        [events(0), lambda _: DOWN, events(3), lambda _: DOWN, events(3), events(6)],
        [events(5), events(6)],
    ],
    ids=["cut twice", "cut before the first event, and not ready", "cut after the last event"],
)
def test_every_event_comes_once(answers: list[Answer]) -> None:
    response, record, tally = run(answers)
    assert response.status == 200 and bytes(record.data) == b"".join(EVENTS)
    assert tally.continued >= 1


def test_a_request_without_an_answer_is_sent_again() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    response, _, tally = run([lambda _: whole[:-1], lambda _: DOWN, lambda _: whole], streamed=False)
    assert (response.status, response.body, tally.sent_again, tally.continued) == (200, b"{}", 1, 0)


def test_a_broken_connection_of_the_same_process_is_an_error() -> None:
    with pytest.raises(HttpError, match="broke"):
        run([events(3)], changes=False)
    assert run([lambda _: DOWN], streamed=False, changes=False)[0].status == 503


def test_events_that_change_or_are_missing_are_seen() -> None:
    with pytest.raises(Incomplete, match=r"numbers \[1, 2, 4, 5, 6\]"):
        run([events(2), lambda _: chunked(b"".join(EVENTS[3:]), is_whole=True)], seed=3)
    others = [event.replace(b"data: ", b"data: other ") for event in EVENTS]
    with pytest.raises(Incomplete, match="came again as"):
        for seed in range(20):  # until the client asks for events that it has
            run([events(5), lambda after: chunked(b"".join(others[after:]), is_whole=True)], seed=seed)
