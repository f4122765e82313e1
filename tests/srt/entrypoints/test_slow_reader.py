"""A client that does not read: what its connection may hold, and that nobody else waits for it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from fake_http import FakeScheduler, make_manager, text_of
from patience import PATIENCE_S
from uvicorn.server import ServerState

from tercet.managers.generation import MAX_BACKLOG
from tercet.srt.entrypoints.bounded_http import BoundedHttpProtocol
from tercet.srt.entrypoints.http_server import create_app, make_server

NUM_TOKENS = 200


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return len(self.written)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_slow_reader_holds_little_and_blocks_nobody(samples: int) -> None:
    body = {
        "text": "abc",
        "stream": True,
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "n": samples},
    }

    async def run() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler, incremental_streaming_output=True)
        config = uvicorn.Config(
            create_app(make_server(manager)), http=BoundedHttpProtocol, lifespan="off", log_config=None
        )
        config.load()
        state = ServerState()

        def connect() -> tuple[BoundedHttpProtocol, Transport]:
            protocol, transport = BoundedHttpProtocol(config=config, server_state=state, app_state={}), Transport()
            protocol.connection_made(transport)
            data = json.dumps(body).encode()
            head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            protocol.data_received(head.encode() + data)
            return protocol, transport

        slow, slow_transport = connect()
        while b"data: " not in slow_transport.written:
            await asyncio.sleep(0)
        generations = list(manager._requests._generations.values())
        slow.pause_writing()
        held = len(slow_transport.written)
        _, quick_transport = connect()
        while b"[DONE]" not in quick_transport.written or not all(one.is_over for one in generations):
            await asyncio.sleep(0)
            assert all(len(one._waiting) <= MAX_BACKLOG for one in generations)
        assert len(slow_transport.written) == held, "nothing is written while the client does not read"
        slow.resume_writing()
        while b"[DONE]" not in slow_transport.written:
            await asyncio.sleep(0)
        assert texts(slow_transport.written) == texts(quick_transport.written) == [text_of(NUM_TOKENS)] * samples
        assert slow_transport.written.count(b"data: ") < 10 * samples, "what has waited comes in few events"
        assert quick_transport.written.count(b"data: ") > NUM_TOKENS * samples
        for protocol in list(state.connections):
            protocol.connection_lost(None)

    def texts(written: bytearray) -> list[str]:
        found = [""] * samples
        for line in written.split(b"\n"):
            if line.startswith(b"data: {"):
                answer = json.loads(line.removeprefix(b"data: "))
                found[answer.get("index", 0)] += answer["text"]
        return found

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
