"""Streams that clients continue, and the limits of their clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from breakable_http import Connection
from fake_http import Site

from tercet.srt.entrypoints import resumable
from tercet.srt.entrypoints.replay import Replay
from tercet.srt.entrypoints.resumable import ResumableStream, ResumableStreams
from tercet.srt.entrypoints.stream_journal import SavedRequest, SavedStream


async def pause() -> None:
    """Everything that can happen without time happens."""
    for _ in range(9):
        await asyncio.sleep(0)


def test_a_stream_without_a_client_counts_for_its_limit() -> None:
    site = Site(resume_grace=60.0, max_concurrent_requests_per_key=1)
    site.scheduler.gate = True
    body = {"prompt": "a", "max_tokens": 4, "stream": True}

    async def run() -> None:
        connection = Connection(site, "POST", "/v1/completions", body)
        while not site.scheduler.held:
            await asyncio.sleep(0)
        site.scheduler.release()
        (event,) = await connection.break_after(1)
        other = Connection(site, "POST", "/v1/completions", body)
        await other.done
        assert other.status == 429
        again = Connection(site, "GET", "/v1/streams", last_event_id=event[0].decode())
        site.scheduler.gate = False
        site.scheduler.release()
        await again.done
        third = Connection(site, "POST", "/v1/completions", body)
        await third.done
        assert third.status == 200

    site.run(run())
    site.close()


@pytest.mark.parametrize("is_endless", [True, False])
@pytest.mark.parametrize("num_turns", [0, 1, 9])
def test_a_stream_gives_back_its_place_and_its_memory_once(num_turns: int, is_endless: bool) -> None:
    """However soon it is ended, even before it has begun to read its request."""
    streams = ResumableStreams(60.0)
    ends: list[str] = []

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"data: 2\n\n"
        if is_endless:
            await asyncio.Event().wait()

    async def run() -> None:
        stream = streams.open("s", "", b"data: 1\n\n", source(), lambda: ends.append("s"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        assert streams.num_held_bytes > 0
        stream.end()
        await pause()

    asyncio.run(run())
    assert ends == ["s"] and streams.num_held_bytes == 0


async def left(streams: ResumableStreams, name: str, *, is_over: bool = False) -> ResumableStream:
    """A stream whose client has left."""

    async def source() -> AsyncGenerator[bytes, None]:
        if not is_over:
            await asyncio.Event().wait()
        return
        yield b""

    stream = streams.open(name, "", b"data: 1\n\n", source(), lambda: None)
    stream.attach(0).leave()
    await pause()
    return stream


@pytest.mark.parametrize("bound", ["MAX_DETACHED", "MAX_HELD_BYTES"])
def test_of_too_many_streams_without_a_client_an_ended_one_goes_first(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = ResumableStreams(60.0)

    async def run() -> None:
        for name in ("oldest", "ended", "newest"):
            await left(streams, name, is_over=name == "ended")
        monkeypatch.setattr(resumable, bound, {"MAX_DETACHED": 3, "MAX_HELD_BYTES": streams.num_held_bytes}[bound])
        await left(streams, "ended2", is_over=True)
        assert [name for name in ("oldest", "ended", "newest") if name in streams] == ["oldest", "newest"]
        await left(streams, "newer")
        assert [name for name in ("oldest", "newest", "newer") if name in streams] == ["oldest", "newest", "newer"]

    asyncio.run(run())


def test_the_grace_time_ends_when_a_client_comes_and_begins_anew_when_it_leaves() -> None:
    streams = ResumableStreams(60.0)

    async def run() -> None:
        stream = await left(streams, "s")
        timer = streams._detached[stream]
        reader = stream.attach(0)
        assert timer.cancelled() and not streams._detached
        reader.leave()
        assert not streams._detached[stream].cancelled()

    asyncio.run(run())


def test_a_long_stream_of_another_server_keeps_only_its_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other server may have sent the others."""
    monkeypatch.setattr(resumable, "MAX_STREAM_BYTES", 1000)

    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b"data: 1\n\n"
        await asyncio.Event().wait()

    async def run() -> None:
        saved = SavedStream(SavedRequest("/generate", b"{}", "", b"nonce", 1.5, {}, []), [])
        stream = ResumableStreams(60.0).restore(Replay("0" * 32, saved), "", events(), lambda: None)
        while stream.last < 100:
            await asyncio.sleep(0)
        assert 0 < stream.num_bytes <= 1000
        stream.end()
        await pause()

    asyncio.run(run())
