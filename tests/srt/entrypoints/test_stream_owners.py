"""Who may continue a stream of the server before, and which tenant it is charged to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from breakable_http import Connection
from resumed_sites import ask, kill, make_site, read

from tercet.srt.entrypoints.replay import Replay
from tercet.srt.entrypoints.saved_streams import SavedStreams
from tercet.srt.entrypoints.stream_journal import StreamJournal
from tercet.srt.errors import StreamChanged

STREAM = "0" * 32
OWNER, OTHER = "5e5a", "b0b0"


class OtherVersion(msgspec.Struct, array_like=True):
    """A request as another version records it."""

    path: str = "/generate"
    body: bytes = b"{}"
    owner: str = OWNER
    new: int = 1


class Unreadable(msgspec.Struct, array_like=True):
    owner: int = 1


@pytest.mark.parametrize("record", [OtherVersion(), Unreadable()], ids=["of another version", "unreadable"])
@pytest.mark.parametrize("is_shared", [False, True])
def test_another_key_is_not_told_that_a_record_is_of_another_version(
    tmp_path: Path, record: Any, is_shared: bool
) -> None:
    async def never(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
        raise AssertionError

    async def run() -> None:
        journal = StreamJournal.open(tmp_path / "streams")
        journal.begin(STREAM, record)
        journal.close()
        journal = StreamJournal.open(tmp_path / "streams", is_shared=is_shared)
        saved = SavedStreams(journal, {}, grace_s=60.0)
        for owner in (OTHER, ""):
            await saved.restore(STREAM, owner, lambda: "1", {"headers": []}, never)  # so it is not found
        if isinstance(record, OtherVersion):
            with pytest.raises(StreamChanged, match="another version"):
                await saved.restore(STREAM, OWNER, lambda: "1", {"headers": []}, never)
        else:
            await saved.restore(STREAM, OWNER, lambda: "1", {"headers": []}, never)
        journal.close()

    asyncio.run(run())


def test_another_key_is_not_told_how_a_restore_ends(tmp_path: Path) -> None:
    """It asks while the owner's request restores the stream."""

    async def run() -> None:
        journal = StreamJournal.open(tmp_path / "streams")
        journal.begin(STREAM, OtherVersion())
        saved = SavedStreams(journal, {}, grace_s=60.0)
        saved._restoring[STREAM] = asyncio.get_running_loop().create_future()  # type: ignore[assignment]
        await asyncio.wait_for(saved.restore(STREAM, OTHER, lambda: "1", {}, None), 0.5)  # type: ignore[arg-type]
        saved.streams.drain()
        saved._waiting.clear()
        await saved.restore(STREAM, OTHER, lambda: "1", {}, None)  # type: ignore[arg-type]
        journal.close()

    asyncio.run(run())


def charged(tmp_path: Path, before: dict[str, Any], after: dict[str, Any], tenant: dict[str, str]) -> set[str]:
    """The tenants of a stream at the second server: that of the engine, and those of its metrics."""
    site = make_site(tmp_path / "streams", **before)
    site.scheduler.gate = True
    keys = {"authorization": "Bearer sesame"}

    async def first() -> list[tuple[bytes, bytes]]:
        body = {"prompt": "a", "max_tokens": 9, "stream": True, "user": "field"}
        return await read(site, Connection(site, "POST", "/v1/completions", body, **keys, **tenant), 3)

    events = site.run(first())
    file = kill(site, tmp_path / "streams")
    site = make_site(file, enable_metrics=True, **after)
    status, data = ask(site, events[-1][0], **keys, x_tenant="another")
    assert status == 200 and data.endswith(b"[DONE]\n\n")
    metrics = site.manager.metrics
    assert metrics is not None
    found = {request.options.tenant for request in site.scheduler.received} | set(metrics.tenants)
    kill(site, file)
    return found


TWO = {"api_key": ["pomegranate", "sesame"]}


@pytest.mark.parametrize(
    ("before", "after", "tenant", "expected"),
    [
        ({}, {}, {"x_tenant": "gateway"}, "gateway"),
        ({}, {}, {}, "field"),
        ({"api_key": ["sesame"]}, {"api_key": ["sesame"]}, {"x_tenant": "gateway"}, "gateway"),
        ({"api_key": ["sesame", "pomegranate"]}, TWO, {}, "key-2"),
        ({"api_key": ["sesame"]}, TWO, {"x_tenant": "key-1"}, "key-2"),
        (TWO, {"api_key": ["sesame"]}, {}, "key-2"),
    ],
    ids=["header", "field", "one key", "another order", "more keys", "fewer keys"],
)
def test_a_stream_is_charged_to_one_tenant(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], tenant: dict[str, str], expected: str
) -> None:
    assert charged(tmp_path, before, after, tenant) == {expected}
