"""What an EventStream sends besides its events: headers, and comments while nothing else comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tercet.srt.entrypoints import sse

COMMENT = b": restarting\n\n"
TOKEN = b"data: token\n\n"
FEW = sse._QUICK_INTERVALS * 2 // 3
MANY = sse._QUICK_INTERVALS * 3
Parts = Callable[["Sent"], AsyncGenerator[bytes, None]]


class Sent:
    """A stream and what it has sent. The comments look for new parts once in each pass of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sse, "_COMMENT_INTERVAL_S", 0.0)
        self.manager: Any = SimpleNamespace(on_stall=set(), stall=None)
        self.messages: list[dict[str, Any]] = []
        self.has_ended = False
        self.stream: sse.EventStream

    def run(self, parts: Parts) -> None:
        asyncio.run(self.serve(parts))

    async def serve(self, parts: Parts) -> None:
        def on_end() -> None:
            self.has_ended = True

        self.stream = sse.EventStream(parts(self), self.manager, on_end)
        await self.stream(None, None, self._send)  # type: ignore[arg-type]
        assert self.has_ended and not self.manager.on_stall

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        await asyncio.sleep(0)  # a slow client

    def stall(self) -> None:
        self.manager.stall = "restarting"
        for callback in list(self.manager.on_stall):
            callback()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def num_comments(self) -> int:
        return self.bodies.count(COMMENT)

    @property
    def comments_are_over(self) -> bool:
        return self.stream._comments is None or self.stream._comments.done()


async def silence() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


def test_no_cache_and_no_proxy_keeps_the_events(sent: Sent) -> None:
    async def parts(sent: Sent) -> AsyncGenerator[bytes, None]:
        yield TOKEN

    sent.run(parts)
    start, *bodies = sent.messages
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert dict(start["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert [(body["body"], body["more_body"]) for body in bodies] == [(TOKEN, True), (b"", False)]


def test_each_stall_has_comments_until_tokens_flow(sent: Sent) -> None:
    async def parts(sent: Sent) -> AsyncGenerator[bytes, None]:
        for _ in range(2):
            before = sent.num_comments
            sent.stall()
            await silence()
            assert sent.num_comments > before
            sent.manager.stall = None
            for _ in range(MANY):
                yield TOKEN
            assert sent.comments_are_over
            before = sent.num_comments
            await silence()
            assert sent.num_comments == before

    sent.run(parts)
    assert sent.bodies.count(TOKEN) == 2 * MANY


def test_tokens_flow_only_if_none_of_the_last_intervals_was_silent(sent: Sent) -> None:
    async def parts(sent: Sent) -> AsyncGenerator[bytes, None]:
        sent.stall()
        await silence()
        sent.manager.stall = None
        for _ in range(3):
            for _ in range(FEW):
                yield TOKEN
            await silence()
        assert not sent.comments_are_over

    sent.run(parts)


def test_the_first_comment_comes_at_once(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    async def parts(sent: Sent) -> AsyncGenerator[bytes, None]:
        sent.stall()
        await silence()
        assert sent.num_comments == 1
        yield TOKEN

    monkeypatch.setattr(sse, "_COMMENT_INTERVAL_S", 3600.0)
    sent.run(parts)


def test_a_stream_that_begins_in_a_stall_has_comments_and_none_after_its_end(sent: Sent) -> None:
    async def parts(sent: Sent) -> AsyncGenerator[bytes, None]:
        await silence()
        yield TOKEN
        await silence()

    sent.manager.stall = "restarting"
    sent.run(parts)
    before, after = sent.bodies[: sent.bodies.index(TOKEN)], sent.bodies[sent.bodies.index(TOKEN) :]
    assert COMMENT in before and COMMENT in after
    assert sent.messages[-1]["more_body"] is False


def test_a_client_that_is_gone_ends_the_parts(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def gone(message: Any) -> None:
        if message.get("body") == TOKEN:
            raise OSError

    async def parts(sent: Sent) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield TOKEN
        finally:
            closed.append(sent.has_ended)

    async def work() -> None:
        made = parts(sent)  # the reference keeps it from being closed as garbage
        await sent.serve(lambda _: made)
        assert closed == [True]

    monkeypatch.setattr(sent, "_send", gone)
    asyncio.run(work())
