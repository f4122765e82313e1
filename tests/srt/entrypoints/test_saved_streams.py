"""Streams of the server before, when they cannot be restored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S

from tercet.srt.entrypoints import stream_journal
from tercet.srt.entrypoints.replay import Replay
from tercet.srt.entrypoints.saved_streams import SavedStreams
from tercet.srt.entrypoints.stream_journal import SavedPrompt, SavedRequest, StreamJournal
from tercet.srt.errors import EngineDead, StreamChanged
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

STREAM = "0" * 32


def journal_with_a_stream(tmp_path: Path) -> StreamJournal:
    journal = StreamJournal.open(tmp_path / "streams")
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=5), stream=True)
    settings = {"weight_version": "1"}
    request = SavedRequest("/generate", b"{}", "", b"nonce", 1.5, settings, [SavedPrompt(b"1234", options)])
    journal.begin(STREAM, request)
    return journal


async def fails(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
    raise StreamChanged("it was decoded")


def test_another_key_is_not_told_that_the_settings_differ(tmp_path: Path) -> None:
    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        saved = SavedStreams(journal, {}, grace_s=60.0)
        await saved.restore(STREAM, "another", lambda: "2", {"headers": []}, fails)  # so it is not found
        with pytest.raises(StreamChanged, match="weight_version"):
            await saved.restore(STREAM, "", lambda: "2", {"headers": []}, fails)
        journal.close()

    asyncio.run(run())


def test_a_long_stream_is_decoded_outside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    decode = stream_journal._decode_batch

    def note_thread(data: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(data)

    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        journal.note(STREAM, 1, [])
        saved = SavedStreams(journal, {}, grace_s=60.0)
        with pytest.raises(StreamChanged, match="decoded"):
            await saved.restore(STREAM, "", lambda: "1", {"headers": []}, fails)
        journal.close()

    monkeypatch.setattr(stream_journal, "_decode_batch", note_thread)
    asyncio.run(run())
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_shutdown_that_begins_while_a_stream_is_restored_leaves_it_to_the_next_server(tmp_path: Path) -> None:
    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        saved = SavedStreams(journal, {}, grace_s=60.0)

        async def drain_meanwhile(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
            saved.streams.drain()  # so the stream that this request has opened is gone

        with pytest.raises(EngineDead, match="the next one will continue"):
            await saved.restore(STREAM, "", lambda: "1", {"headers": []}, drain_meanwhile)
        assert STREAM in journal
        journal.close()

    asyncio.run(run())


def test_shutdown_that_begins_while_events_are_replayed_leaves_the_stream_to_the_next_server(tmp_path: Path) -> None:
    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        saved = SavedStreams(journal, {}, grace_s=60.0)

        async def no_events() -> AsyncGenerator[bytes, None]:
            saved.streams.drain()
            await asyncio.Event().wait()
            yield b""

        async def open_stream(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
            saved.streams.restore(replay, "", no_events(), lambda: None)

        with pytest.raises(EngineDead, match="the next one will continue"):
            await asyncio.wait_for(saved.restore(STREAM, "", lambda: "1", {"headers": []}, open_stream), PATIENCE_S)
        assert STREAM in journal and STREAM not in saved.streams
        journal.close()

    asyncio.run(run())


def test_shutdown_that_begins_just_before_a_stream_is_opened_again_ends_its_request(tmp_path: Path) -> None:
    """Its request must not delay the end of the server."""
    ended: list[str] = []

    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        saved = SavedStreams(journal, {}, grace_s=60.0)

        async def events() -> AsyncGenerator[bytes, None]:
            yield b"data: 1\n\n"

        async def drain_first(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
            saved.streams.drain()
            saved.streams.restore(replay, "", events(), lambda: ended.append("request"))

        with pytest.raises(EngineDead, match="the next one will continue"):
            await saved.restore(STREAM, "", lambda: "1", {"headers": []}, drain_first)
        assert ended == ["request"] and STREAM in journal
        journal.close()

    asyncio.run(run())


def test_an_update_of_the_weights_that_ends_while_a_stream_is_loaded_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "1"
    decode = stream_journal._decode_batch

    def update_meanwhile(data: Any) -> Any:
        nonlocal version
        version = "2"
        return decode(data)

    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        journal.note(STREAM, 1, [])
        saved = SavedStreams(journal, {}, grace_s=60.0)
        with pytest.raises(StreamChanged, match="weight_version"):
            await saved.restore(STREAM, "", lambda: version, {"headers": []}, fails)
        assert STREAM in journal
        journal.close()

    monkeypatch.setattr(stream_journal, "_decode_batch", update_meanwhile)
    asyncio.run(run())


@pytest.mark.parametrize("drains", [False, True])
def test_a_restore_that_fails_after_the_grace_time_is_the_last_one(tmp_path: Path, drains: bool) -> None:
    """But a server that shuts down leaves the stream to the next one."""

    async def run() -> None:
        journal = journal_with_a_stream(tmp_path)
        saved = SavedStreams(journal, {}, grace_s=0.0)

        async def fails_late(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
            saved.begin_grace()
            while not saved._is_grace_over:
                await asyncio.sleep(0.001)
            if drains:
                saved.streams.drain()
            raise StreamChanged("it was late")

        with pytest.raises(StreamChanged, match="late"):
            await saved.restore(STREAM, "", lambda: "1", {"headers": []}, fails_late)
        assert (STREAM in journal) == drains
        journal.close()

    asyncio.run(run())
