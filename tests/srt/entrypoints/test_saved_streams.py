"""Streams of the server before, when they cannot be restored."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tercet.srt.entrypoints.replay import Replay
from tercet.srt.entrypoints.saved_streams import SavedStreams
from tercet.srt.entrypoints.stream_journal import SavedPrompt, SavedRequest, StreamJournal
from tercet.srt.errors import EngineDead
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

STREAM = "0" * 32


def test_shutdown_that_begins_while_a_stream_is_restored_leaves_it_to_the_next_server(tmp_path: Path) -> None:
    async def run() -> None:
        journal = StreamJournal.open(tmp_path / "streams")
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=5), stream=True)
        settings = {"weight_version": "1"}
        journal.begin(
            STREAM, SavedRequest("/generate", b"{}", "", b"nonce", 1.5, settings, [SavedPrompt(b"1234", options)])
        )
        saved = SavedStreams(journal, {}, grace_s=60.0)

        async def drain_meanwhile(scope: Mapping[str, Any], body: bytes, replay: Replay) -> Any:
            saved.streams.drain()  # so the stream that this request has opened is gone

        with pytest.raises(EngineDead, match="the next one will continue"):
            await saved.restore(STREAM, "", "1", {"headers": []}, drain_meanwhile)
        assert STREAM in journal
        journal.close()

    asyncio.run(run())
