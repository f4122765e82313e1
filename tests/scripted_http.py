"""A server that sends exactly the bytes of a test's script. Every request runs the script."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from patience import PATIENCE_S


@dataclass
class Exchange:
    """One request, with the methods to answer it."""

    number: int
    """Number of earlier requests on all connections."""
    connection: int
    """Number of earlier connections."""
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: Any, status: str = "200 OK") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def piece(self, data: bytes) -> None:
        """Sends a piece of a stream's body."""
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, content: Any) -> None:
        await self.piece(sse(content))

    async def stream(self, events: Sequence[Any], done: bool = True) -> None:
        """Sends a complete stream. With `done`, the last event is `[DONE]`."""
        await self.begin_stream()
        for content in events:
            await self.event(content)
        if done:
            await self.piece(b"data: [DONE]\n\n")
        await self.piece(b"")

    def hang_up(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


class ScriptedServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Exchange] = []
        self.failures: list[BaseException] = []
        """Exceptions of the script."""
        self.left: list[int] = []
        """Numbers of the connections that have ended."""
        self.url = ""
        self.listener: asyncio.Server
        self._connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._connections
        self._connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, path, _ = first.split(" ")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                exchange = Exchange(len(self.seen), connection, method, path, headers, body, writer)
                self.seen.append(exchange)
                await self.script(exchange)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client or the script has closed the connection
        except Exception as error:
            self.failures.append(error)
        finally:
            self.left.append(connection)
            writer.close()


def sse(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    """Runs the server on a free port, in a thread."""
    server = ScriptedServer(script)
    started = threading.Event()
    stop: list[Callable[[], None]] = []

    async def run() -> None:
        stopping = asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(stopping.set))
        loop = asyncio.get_running_loop()
        server.listener = listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{port}"
        started.set()
        await stopping.wait()
        listener.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not server.failures, server.failures
