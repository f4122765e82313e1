"""Streams of the server before whose engine fails, or which are aborted, while their events are repeated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from breakable_http import Connection, events_in
from fake_adapters import PIRATE, WITH_PIRATE
from patience import PATIENCE_S
from resumed_sites import ask, begun, kill, make_site, saved_of

from tercet.srt.entrypoints import replay
from tercet.srt.errors import InvalidLogits
from tercet.srt.io_struct import AbortFinish


def test_a_failure_before_the_first_event_is_an_event(tmp_path: Path) -> None:
    """The client has its status, 200, before the engine gets the request."""
    file, events = begun(tmp_path / "streams", num_events=1)
    file.write_bytes(file.read_bytes()[:-1])
    site = make_site(file)
    site.scheduler.fail = (0, AbortFinish.of(InvalidLogits("the logits are NaN")))
    name = events[0][0].partition(b"/")[0] + b"/0"

    async def run() -> None:
        stream = Connection(site, "GET", "/v1/streams", last_event_id=name.decode())
        await asyncio.wait_for(stream.done, PATIENCE_S)
        assert stream.status == 200
        assert b"the logits are NaN" in stream.data and stream.data.endswith(b"[DONE]\n\n")

    site.run(run())
    kill(site, file)


def test_the_end_of_the_engine_before_the_first_event_leaves_the_stream_to_the_next_server(tmp_path: Path) -> None:
    file, events = begun(tmp_path / "streams", num_events=1)
    file.write_bytes(file.read_bytes()[:-1])
    name = events[0][0].partition(b"/")[0]
    site = make_site(file)
    site.scheduler.mute = True

    async def run() -> None:
        stream = Connection(site, "GET", "/v1/streams", last_event_id=(name + b"/0").decode())
        while not site.scheduler.received:
            await asyncio.sleep(0)
        site.manager.fail("the engine was shut down")
        await asyncio.wait_for(stream.done, PATIENCE_S)
        assert stream.status == 200 and not stream.data
        assert saved_of(site).streams[name.decode()].is_interrupted, "otherwise it is forgotten after the grace time"

    site.run(run())
    assert saved_of(site)._journal.ids() == [name.decode()]
    file = kill(site, file)
    site = make_site(file)
    assert events_in(ask(site, name + b"/0")[1])[0] == events[0]
    kill(site, file)


@pytest.mark.parametrize("ending", ["death", "abort"])
def test_the_end_of_a_sample_while_its_events_are_repeated(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_YIELD_AFTER", 1)
    file, events = begun(tmp_path / "streams", num_events=1000, fields={"n": 2})
    name = events[0][0].partition(b"/")[0]
    site = make_site(file)

    async def run() -> None:
        stream = Connection(site, "GET", "/v1/streams", last_event_id=(name + b"/0").decode())
        while not any(one.output_ids for one in site.manager.live_samples()):
            await asyncio.sleep(0)
        if ending == "death":
            site.manager.fail("the engine was shut down")
        else:
            site.manager.abort_all()
        await asyncio.wait_for(stream.done, PATIENCE_S)
        assert b"internal_server_error" not in stream.data
        assert stream.data.endswith(b"[DONE]\n\n") == (ending == "abort")

    site.run(run())
    file = kill(site, file)
    if ending == "death":
        site = make_site(file)
        assert events_in(ask(site, name + b"/0")[1]) == events
        kill(site, file)


def test_a_stream_of_an_adapter_goes_on_only_with_the_same_files(tmp_path: Path) -> None:
    file, events = begun(tmp_path / "streams", fields={"model": "pirate"}, **WITH_PIRATE)
    name = events[-1][0]
    for adapters in ([], [msgspec.structs.replace(PIRATE, fingerprint="f2")]):
        site = make_site(file, **{**WITH_PIRATE, "adapters": adapters})
        status, data = ask(site, name)
        assert status == 409 and b"not loaded or have changed ('pirate')" in data and not site.scheduler.received
        file = kill(site, file)
    site = make_site(file, **WITH_PIRATE)
    assert ask(site, name)[0] == 200, "the mistake can be undone"
    (request,) = site.scheduler.received
    assert request.options.adapter == PIRATE.ref
    kill(site, file)


def test_a_restored_stream_does_not_go_on_with_other_files_of_its_adapter(tmp_path: Path) -> None:
    """The scheduler refuses a request of files that it does not have, so it is told those of before."""
    file, events = begun(tmp_path / "streams", fields={"model": "pirate"}, **WITH_PIRATE)
    site = make_site(file, **WITH_PIRATE)

    async def restore() -> None:
        await Connection(site, "HEAD", "/v1/streams", last_event_id=events[-1][0].decode()).done

    site.run(restore())
    site.manager.adapters.use([msgspec.structs.replace(PIRATE, fingerprint="f2")])
    assert ask(site, events[-1][0])[0] == 200
    (request,) = site.scheduler.received
    assert request.options.adapter == PIRATE.ref
    kill(site, file)
