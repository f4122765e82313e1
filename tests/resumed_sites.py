"""Sites with `--resume-file`, and clients that continue streams at the next one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from breakable_http import Connection, events_in
from fake_http import Site

from tercet.srt.entrypoints.saved_streams import SavedStreams
from tercet.srt.entrypoints.stream_journal import StreamJournal

SETTINGS = {"model": "a", "dtype": "b"}


def make_site(path: Path, given: dict[str, str] = SETTINGS, grace_s: float = 60.0, **flags: Any) -> Site:
    saved = SavedStreams(StreamJournal.open(path), given, grace_s)
    site = Site(app={"saved": saved}, resume_grace=grace_s, resume_file=str(path), **flags)
    site.scheduler.words = WORDS
    return site


WORDS = ("<tool_call>", '{"name": "look", ', '"arguments": {}}', "</tool_call>", " fünf", " \\six\n", "", " 🙂", "x")


def saved_of(site: Site) -> SavedStreams:
    return next(route.app.server.saved for route in site.app.routes if hasattr(route.app, "server"))


def kill(site: Site, path: Path) -> Path:
    """The file as the dead server leaves it. Its lock goes with its process."""
    left = path.with_name(path.name + "x")
    shutil.copy(path, left)
    saved_of(site)._journal.close()
    site.close()
    return left


async def go_on(site: Site, got: list[tuple[bytes, bytes]], num_events: int) -> list[tuple[bytes, bytes]]:
    """The next events of a stream. Those that the client has are still the same."""
    name = got[-1][0].decode()
    again = Connection(site, "GET", "/v1/streams", last_event_id=name)
    new = await read(site, again, num_events)
    assert again.status == 200, again.data
    whole = Connection(site, "GET", "/v1/streams", last_event_id=name.partition("/")[0] + "/0")
    assert (await read(site, whole, len(got)))[: len(got)] == got
    return new


def said(events: list[tuple[bytes, bytes]]) -> dict[Any, Any]:
    """What the events say together, however they divide it, without times and random names."""
    found: dict[Any, Any] = defaultdict(str)
    for _, rest in events:
        *_, line = rest.decode().split("\n")
        if line == "data: [DONE]":
            found["end"] += line
            continue
        event = json.loads(line[6:])
        found["usage"] = event.get("usage")
        if "meta_info" in event:  # an event has all so far
            plain = {key: value for key, value in event["meta_info"].items() if key not in _TIMES}
            found[event["index"]] = {**event, "meta_info": plain}
        if "response" in event:
            items = [{**item, "id": ""} for item in event["response"]["output"]]
            found["response"] = event["response"]["status"], items, event["response"]["usage"]
        delta = event.get("delta", "")
        if isinstance(delta, dict):
            found["end"] += delta.get("stop_reason", "")
            delta = delta.get("text", "")
        found["deltas"] += delta
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            add(found, (choice["index"],), {key: delta.get(key) or "" for key in ("content", "text", "role")})
            add(
                found, (choice["index"],), {"finish": choice["finish_reason"] or "", "ids": choice.get("token_ids", [])}
            )
            add(found, (choice["index"], "logprobs"), choice.get("logprobs") or {})
            for call in delta.get("tool_calls") or ():
                add(found, (choice["index"], call["index"]), call["function"])
    return found


def add(found: dict[Any, Any], place: tuple[Any, ...], pieces: dict[str, Any]) -> None:
    for key, value in pieces.items():
        if value:
            found[*place, key] = (found[*place, key] or type(value)()) + value


_TIMES = {"id", "e2e_latency", "num_recoveries"}


LAST = (b"data: [DONE]", b'data: {"type":"message_stop"}')
"""How the last event of a stream ends. The second one is that of Anthropic's API."""


async def read(site: Site, connection: Connection, num_events: int) -> list[tuple[bytes, bytes]]:
    """The next events of a connection. The engine makes no more tokens than that needs. Then the server dies."""
    for _ in range(10_000):
        await asyncio.sleep(0)
        events = events_in(connection.data)
        if len(events) >= num_events or (events and events[-1][1].endswith(LAST)):
            return events[:num_events]
        if site.scheduler.held:
            site.scheduler.release()
    raise AssertionError(f"no more events: {connection.status} {connection.data!r}")


def begun(
    file: Path, num_events: int = 3, fields: dict[str, Any] | None = None, **flags: Any
) -> tuple[Path, list[tuple[bytes, bytes]]]:
    """A stream whose server has died after so many events: the file, and the events. `fields`: added to the body."""
    site = make_site(file, **flags)
    site.scheduler.gate = True
    key = {"authorization": f"Bearer {flags['api_key'][0]}"} if "api_key" in flags else {}

    async def life() -> list[tuple[bytes, bytes]]:
        body = {"prompt": "a", "max_tokens": 9, "stream": True, **(fields or {})}
        return await read(site, Connection(site, "POST", "/v1/completions", body, **key), num_events)

    events = site.run(life())
    return kill(site, file), events


def ask(site: Site, name: bytes, **headers: str) -> tuple[int, bytes]:
    async def run() -> tuple[int, bytes]:
        connection = Connection(site, "GET", "/v1/streams", last_event_id=name.decode(), **headers)
        while not connection.status or (connection.status == 200 and not connection.data.rstrip().endswith(LAST)):
            await asyncio.sleep(0)
        connection.leave()
        await connection.done
        return connection.status, connection.data

    return site.run(run())
