"""The HTTP app with a fake engine, behind a real server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import uvicorn
from fake_http import FakeScheduler, make_manager
from patience import PATIENCE_S

from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.entrypoints.bounded_http import BoundedHttpProtocol
from tercet.srt.entrypoints.http_server import create_app, make_server


class LiveSite:
    """The same app behind uvicorn on a free port, in a thread."""

    def __init__(self, scheduler: FakeScheduler, manager: TokenizerManager, address: tuple[str, int]) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self.address = address
        self.url = f"http://{address[0]}:{address[1]}"

    def send(self, method: str, path: str, body: Any) -> socket.socket:
        """Sends a request and returns its connection, without reading the response."""
        data = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.create_connection(self.address, timeout=PATIENCE_S)
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def live_site(**settings: Any) -> Iterator[LiveSite]:
    scheduler = FakeScheduler()
    manager = make_manager(scheduler, **settings)
    config = uvicorn.Config(create_app(make_server(manager)), http=BoundedHttpProtocol, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield LiveSite(scheduler, manager, listener.getsockname())
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
