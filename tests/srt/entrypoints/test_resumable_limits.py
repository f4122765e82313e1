"""Streams that clients continue, and the limits of their clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from breakable_http import Connection
from fake_http import Site

from tercet.srt.entrypoints.resumable import ResumableStreams


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
        for _ in range(9):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert ends == ["s"] and streams.num_held_bytes == 0
