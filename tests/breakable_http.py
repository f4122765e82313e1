"""A client of the app in one process, whose connection can break at any moment."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fake_http import Site
from starlette.types import Message, Scope


class Connection:
    """One HTTP connection to the app in this process, which can break."""

    def __init__(self, site: Site, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.data = b""
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        self._broken = asyncio.Event()
        self.may_read = asyncio.Event()
        self.may_read.set()
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                *((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        self.done = asyncio.create_task(site.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._broken.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._broken.is_set():
            return
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        await self.may_read.wait()
        self.data += message["body"]

    async def begun(self) -> None:
        """Waits for the status."""
        while not self.status:
            assert not self.done.done(), "there was no response"
            await asyncio.sleep(0)

    async def has(self, num_events: int) -> None:
        """Waits for so many events, or for the last one."""
        while self.data.count(b"\n\n") < num_events and not self.data.endswith(b"data: [DONE]\n\n"):
            assert not self.done.done(), "the response ended before"
            await asyncio.sleep(0)

    async def break_after(self, num_events: int) -> list[tuple[bytes, bytes]]:
        """Breaks when the client has so many events, and maybe a part of the next. Returns those it has in full."""
        await self.has(num_events)
        self.leave()
        await self.done
        return events_in(self.data)[:num_events]

    def leave(self) -> None:
        self._broken.set()


def events_in(data: bytes) -> list[tuple[bytes, bytes]]:
    """The id and the rest of each whole event."""
    events = []
    for part in data.split(b"\n\n")[:-1]:
        line, _, rest = part.partition(b"\n")
        assert line.startswith(b"id: ")
        events.append((line[4:], rest))
    return events
