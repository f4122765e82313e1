"""Streams that clients continue, and the limits of their clients."""

from __future__ import annotations

import asyncio

from breakable_http import Connection
from fake_http import Site


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
