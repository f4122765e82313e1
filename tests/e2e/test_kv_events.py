"""A real server with a toy model publishes what its tiers have, also after a restart of the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import zmq
from kv_event_reader import DEVICE, DISK, HOST, KVEventReader
from toy_engine import REAL_SERVER, ServerProcess, toy_flags

pytestmark = pytest.mark.e2e

PAGE = 8
BLOCK = 64
"""Tokens of a block of the lower tiers."""


@pytest.mark.timeout(180)
def test_a_router_knows_the_cache_of_a_server(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # the names of sockets must be short
    config = {"publisher": "zmq", "endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r"}
    flags = [*toy_flags(tmp_path), "--port", "0", "--page-size", str(PAGE), "--max-total-tokens", "512"]
    flags += ["--enable-hierarchical-cache", "--hicache-size", "0.01", "--hicache-storage-dir", str(tmp_path / "kv")]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replay = context.socket(zmq.DEALER)
    replay.setsockopt(zmq.RCVTIMEO, 60_000)
    replay.connect(config["replay_endpoint"])
    live = context.socket(zmq.SUB)
    live.setsockopt(zmq.SUBSCRIBE, b"")
    live.setsockopt(zmq.RCVTIMEO, 60_000)
    live.connect(config["endpoint"])
    router = KVEventReader()
    """It has the socket that outlives the engine."""
    try:
        with ServerProcess(tmp_path, [*flags, "--kv-events-config", json.dumps(config)], module=REAL_SERVER) as server:
            server.ready()

            def read() -> KVEventReader:
                """What a reader knows after a replay of everything."""
                reader = KVEventReader()
                replay.send_multipart([b"", bytes(8)])
                while (frames := replay.recv_multipart()[1:])[1] != b"\xff" * 8:
                    reader.on_message(frames)
                return reader

            def read_until(medium: str, *, has_prefix: bool) -> KVEventReader:
                """The answer may come a moment before the events, and files are written later."""
                while ((reader := read()).prefixes_in(medium) >= prefixes) != has_prefix:
                    pass
                return reader

            ids = [5 + index % 25 for index in range(BLOCK + 1)]
            prefixes = {("me", tuple(ids[: PAGE * count])) for count in range(1, BLOCK // PAGE + 1)}
            with server.client() as client:
                assert client.get("/server_info").json()["kv_events"]["block_size"] == PAGE
                first = read()
                assert first.next_seq >= 1 and not first.prefixes & prefixes
                sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": ids, "cache_salt": "me", "session_id": "mine", "sampling_params": sampling}
                client.post("/generate", json=body).raise_for_status()
                reader = read_until(DISK, has_prefix=True)
                assert prefixes <= reader.prefixes_in(DEVICE) & reader.prefixes_in(HOST)
                assert {reader.sessions[one] for one in reader.media[DISK]} == {"mine"}
                client.post("/flush_cache?timeout=10").raise_for_status()
                reader = read_until(DEVICE, has_prefix=False)
                assert not reader.prefixes & prefixes
                read_until(DISK, has_prefix=True)
                client.post("/generate", json=body).raise_for_status()
                while not prefixes <= router.prefixes:
                    router.apply(live.recv_multipart()[2])
                os.kill(server.children["scheduler"], signal.SIGKILL)
                assert server.logged("The engine runs again", 60)
                reader = read_until(DISK, has_prefix=True)
                assert reader.prefixes == reader.prefixes_in(HOST) == set() and reader.next_seq >= 1
                while router.prefixes or not prefixes <= router.prefixes_in(DISK):
                    router.apply(live.recv_multipart()[2])
                client.post("/generate", json=body).raise_for_status()
                assert prefixes <= read_until(DEVICE, has_prefix=True).prefixes_in(HOST)
    finally:
        context.destroy(linger=0)
        shutil.rmtree(folder)
