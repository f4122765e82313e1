"""What a server with `--resume-file` keeps in memory besides the records."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from breakable_http import Connection, events_in
from fake_http import Site

from tercet.srt.entrypoints import sse
from tercet.srt.entrypoints.replay import Replay
from tercet.srt.entrypoints.saved_streams import BODY, SavedStreams
from tercet.srt.entrypoints.stream_journal import StreamJournal


def make_site(path: Path) -> tuple[Site, StreamJournal]:
    journal = StreamJournal.open(path)
    return Site(app={"saved": SavedStreams(journal, {}, 60.0)}, resume_grace=60.0, resume_file=str(path)), journal


@pytest.mark.parametrize("stream", [False, True])
def test_only_a_request_that_is_recorded_keeps_its_body(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scopes: list[Any] = []
    monkeypatch.setattr(sse, "log_received", lambda _, request, *rest: scopes.append(dict(request.scope)))
    site, journal = make_site(tmp_path / "streams")
    assert site.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": stream}).status_code == 200
    assert (BODY in scopes[0]) == stream
    journal.close()
    site.close()


def test_a_stream_that_goes_on_keeps_no_decoded_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, journal = make_site(tmp_path / "streams")
    site.scheduler.gate = True

    async def begin() -> bytes:
        connection = Connection(site, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True})
        while len(events_in(connection.data)) < 3:
            await asyncio.sleep(0)
            if site.scheduler.held:
                site.scheduler.release()
        return events_in(connection.data)[0][0]

    name = site.run(begin())
    journal.close()
    site.close()
    replays: list[Replay] = []
    make_reader = Replay.reader
    monkeypatch.setattr(Replay, "reader", lambda self, *rest: replays.append(self) or make_reader(self, *rest))
    site, journal = make_site(tmp_path / "streams")

    async def go_on() -> None:
        connection = Connection(site, "GET", "/v1/streams", last_event_id=name.decode())
        while not connection.data.endswith(b"[DONE]\n\n"):
            await asyncio.sleep(0)

    site.run(go_on())
    assert replays[0].saved.batches == [] and len(journal.load(name.decode().partition("/")[0]).batches) > 3
    journal.close()
    site.close()
