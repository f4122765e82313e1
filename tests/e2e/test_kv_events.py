"""A real server with a toy model publishes what its cache has, also after a restart of the engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import zmq
from kv_event_reader import KVEventReader
from toy_engine import REAL_SERVER, ServerProcess, toy_flags

pytestmark = pytest.mark.e2e

PAGE = 8


@pytest.mark.timeout(180)
def test_a_router_knows_the_cache_of_a_server(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # the names of sockets must be short
    config = {"publisher": "zmq", "endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r"}
    flags = [*toy_flags(tmp_path), "--port", "0", "--page-size", str(PAGE), "--max-total-tokens", "512"]
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

            with server.client() as client:
                assert client.get("/server_info").json()["kv_events"]["block_size"] == PAGE
                first = read()
                assert first.next_seq >= 1 and ("me", tuple(range(5, 29))) not in first.prefixes
                sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": list(range(5, 30)), "cache_salt": "me", "sampling_params": sampling}
                client.post("/generate", json=body).raise_for_status()
                assert {("me", tuple(range(5, 5 + PAGE * count))) for count in (1, 2, 3)} <= read().prefixes
                client.post("/flush_cache?timeout=10").raise_for_status()
                while read().prefixes:  # the answer may come a moment before the event
                    pass
                client.post("/generate", json=body).raise_for_status()
                while ("me", tuple(range(5, 29))) not in router.prefixes:
                    router.apply(live.recv_multipart()[2])
                os.kill(server.children["scheduler"], signal.SIGKILL)
                assert server.logged("The engine runs again", 60)
                reader = read()
                assert reader.prefixes == set() and reader.next_seq >= 1
                while router.prefixes:
                    router.apply(live.recv_multipart()[2])
                client.post("/generate", json=body).raise_for_status()
                assert ("me", tuple(range(5, 29))) in read().prefixes
    finally:
        context.destroy(linger=0)
        shutil.rmtree(folder)
