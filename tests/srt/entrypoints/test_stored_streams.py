"""When the response of a stream is stored: at its end, also if no client is left, and at another server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from breakable_http import Connection
from fake_http import Site, error_of
from resumed_sites import ask, kill, make_site, read

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "hi", "max_output_tokens": 4, "stream": True}


def stored_in(site: Site) -> int:
    assert site.server.responses is not None
    return len(site.server.responses)


def id_in(events: list[tuple[bytes, bytes]]) -> str:
    """The response of a stream, from its first event."""
    return str(json.loads(events[0][1].partition(b"data: ")[2])["response"]["id"])


async def leave_in_the_middle(site: Site) -> Connection:
    site.scheduler.gate = True
    connection = Connection(site, "POST", PATH, BODY)
    while not site.scheduler.held:
        await asyncio.sleep(0)
    site.scheduler.release()
    await connection.has(4)
    connection.leave()
    await connection.done
    return connection


def test_a_response_is_stored_before_its_client_gets_the_last_event() -> None:
    site = Site(response_store_mib=1)
    add = site.server.responses.add  # type: ignore[union-attr]
    got: list[bytes] = []

    async def run() -> Connection:
        connection = Connection(site, "POST", PATH, BODY)

        def adding(*args: Any) -> None:
            got.append(connection.data)
            add(*args)

        site.server.responses.add = adding  # type: ignore[method-assign, union-attr]
        await connection.done
        return connection

    connection = site.run(run())
    assert b"response.incomplete" in connection.data
    (data,) = got
    assert data.startswith(b"event: response.created") and b"response.incomplete" not in data
    site.close()


def test_a_stream_whose_client_has_left_is_not_stored() -> None:
    site = Site(response_store_mib=1)
    site.run(leave_in_the_middle(site))
    assert site.idle() and stored_in(site) == 0
    site.close()


def test_a_stream_that_goes_on_without_its_client_is_stored() -> None:
    site = Site(response_store_mib=1, resume_grace=60.0)

    async def run() -> str:
        connection = await leave_in_the_middle(site)
        assert stored_in(site) == 0
        while not site.idle():
            if site.scheduler.held:
                site.scheduler.release()
            await asyncio.sleep(0)
        while not stored_in(site):
            await asyncio.sleep(0)
        return connection.data.split(b'"id":"', 1)[1].split(b'"', 1)[0].decode()

    name = site.run(run())
    assert site.get(f"{PATH}/{name}").json()["status"] == "incomplete"
    site.close()


def test_a_stream_that_another_server_ends_is_stored_there(tmp_path: Path) -> None:
    """For the tenant of the request that continues it."""
    site = make_site(tmp_path / "streams", response_store_mib=1)
    site.scheduler.gate = True

    async def life() -> list[tuple[bytes, bytes]]:
        return await read(site, Connection(site, "POST", PATH, BODY, x_tenant="a"), 5)

    events = site.run(life())
    file = kill(site, tmp_path / "streams")
    site = make_site(file, response_store_mib=1)
    status, data = ask(site, events[0][0].partition(b"/")[0] + b"/0", x_tenant="a")
    assert status == 200
    last = json.loads(data.split(b"\n\n")[-3].rpartition(b"data: ")[2])["response"]
    assert last["id"] == id_in(events) and last["store"] is True
    assert site.get(f"{PATH}/{last['id']}", headers={"x-tenant": "a"}).json() == last
    assert site.get(f"{PATH}/{last['id']}").status_code == 404
    kill(site, file)


def test_a_stream_that_continues_a_response_ends_with_its_server(tmp_path: Path) -> None:
    """The other server does not have the conversation."""
    site = make_site(tmp_path / "streams", response_store_mib=1)
    first = site.good(PATH, {"input": "a", "max_output_tokens": 1})["id"]
    site.scheduler.gate = True

    async def life() -> list[tuple[bytes, bytes]]:
        return await read(site, Connection(site, "POST", PATH, {**BODY, "previous_response_id": first}), 5)

    events = site.run(life())
    file = kill(site, tmp_path / "streams")
    site = make_site(file, response_store_mib=1)
    answer = site.get("/v1/streams", headers={"last-event-id": events[-1][0].decode()})
    assert answer.status_code == 409 and error_of(answer)["code"] == "stream_changed"
    assert "stored" in error_of(answer)["message"]
    assert site.idle() and site.server.held.num_bytes == 0
    kill(site, file)
