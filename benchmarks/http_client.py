"""A small HTTP/1.1 client that uses little processor time, so that it hardly slows a server on the same cores.

It is made of an asyncio protocol and the parser of httptools. It has only what a benchmark needs: request bodies of
known length, complete or streamed responses, and keep-alive connections. Each piece of a streamed body is handed over
with its arrival time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from ..srt import env

OnData = Callable[[bytes, float], None]
"""Receives a piece of the body and its arrival time, as `time.perf_counter()` gives it."""

CONNECT_TIMEOUT_S = 30.0


class HttpError(Exception):
    """No complete response: no server listens, the connection broke, or the response is not HTTP."""


class _StaleConnection(HttpError):
    """The server closed an idle keep-alive connection before it sent a byte of the response."""


@dataclass(frozen=True)
class Response:
    status: int
    reason: str
    body: bytes
    """Empty for a streamed response of status 200."""


class HttpClient:
    """A client of one server. Use and close it within one event loop."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, timeout_s: float | None = None) -> None:
        """`headers` are sent with every request. A request without a complete response after `timeout_s` fails.

        Raises ValueError for an invalid URL or header.
        """
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError as error:
            raise ValueError(f"the base URL has no valid port: {base_url!r}") from error
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ValueError(f"the base URL must be like http://127.0.0.1:30000, got {base_url!r}")
        if url.username is not None:
            raise ValueError("the base URL must have no user name; a header can have it (Authorization)")
        self.base_url = base_url
        self._timeout_s = timeout_s
        self._host = url.hostname
        self._tls = url.scheme == "https"
        self._port = port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        own = {"Host": f"{host}:{self._port}", "Accept": "*/*", "Content-Type": "application/json"}
        # Names are the same in upper and lower case. The last header of a name counts.
        lines = {name.lower(): (name, value) for name, value in [*own.items(), *(headers or {}).items()]}
        for name, value in lines.values():
            if not name or not value.isprintable() or not name.isascii() or any(char in name for char in " :\r\n"):
                raise ValueError(f"invalid header {name!r}: {value!r}")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.values()).encode()
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes = b"") -> Response:
        """Sends a request. Returns the complete response of any status. Raises HttpError."""
        return await self._exchange(method, path, body, None)

    async def stream(self, path: str, body: bytes, on_data: OnData, *, method: str = "POST") -> Response:
        """Sends a request. The body of a 200 goes to `on_data` in pieces, as it arrives.

        Any other response has its body in the result. Raises HttpError. An exception of `on_data` ends the exchange and
        is raised here.
        """
        return await self._exchange(method, path, body, on_data)

    async def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop closes the transports in its next turn

    async def _exchange(self, method: str, path: str, body: bytes, on_data: OnData | None) -> Response:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._exchange_without_limit(method, path, body, on_data)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise HttpError(f"the server sent no complete response within {self._timeout_s:g} s") from error

    async def _exchange_without_limit(self, method: str, path: str, body: bytes, on_data: OnData | None) -> Response:
        head = f"{method} {self._path}{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        message = b"".join((head, self._head, b"\r\n", body))
        while True:
            connection, is_new = await self._connection()
            try:
                response = await connection.exchange(message, on_data)
            except _StaleConnection as error:
                if is_new:
                    raise HttpError("the server closed the connection without an answer") from error
                continue
            except BaseException:
                connection.abort()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.abort()
            return response

    async def _connection(self) -> tuple[_Connection, bool]:
        """An idle connection or a new one, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, False
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(_Connection, self._host, self._port, ssl=self._tls or None)
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            raise HttpError(f"could not connect to {self.base_url} within {CONNECT_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise HttpError(f"could not connect to {self.base_url}: {error.strerror or error}") from error
        return connection, True


def api_key_header() -> dict[str, str]:
    """The header with TERCET_API_KEY, which a server of Tercet in the same environment asks for. Empty without it."""
    key = env.api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time. The HTTP parser calls the `on_...` methods."""

    def __init__(self) -> None:
        self.reusable = True
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._done: asyncio.Future[Response] | None = None
        self._on_data: OnData | None = None
        self._begin(None)

    async def exchange(self, message: bytes, on_data: OnData | None) -> Response:
        assert self._done is None, "one exchange at a time"
        if self._transport.is_closing():
            # The server closed it before this task ran: uvloop's transports raise RuntimeError on a write then.
            raise _StaleConnection("closed")
        self._begin(on_data)
        done = self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await done
        finally:
            self._done = None

    def abort(self) -> None:
        self.reusable = False
        self._transport.abort()

    def _begin(self, on_data: OnData | None) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._on_data = on_data
        self._begun = self._in_body = self._framed = False
        self._to: OnData | None = None
        self._now = 0.0
        self._reason = ""
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass of it

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.abort()  # data without a request
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(HttpError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if exc is None and self._in_body and not self._framed:
            self._finish()  # this body ends with the connection
        elif not self._begun:
            self._fail(_StaleConnection(str(exc or "closed")))
        else:
            why = "" if exc is None else f": {exc}"
            self._fail(HttpError(f"the connection broke in the middle of the answer{why}"))

    def on_status(self, status: bytes) -> None:
        self._reason += status.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._in_body = True
        if self._parser.get_status_code() == 200:
            self._to = self._on_data

    def on_body(self, data: bytes) -> None:
        if self._to is None:
            self._body += data
        else:
            self._to(data, self._now)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._reason = ""
            self._in_body = self._framed = False
            return
        self.reusable = self._parser.should_keep_alive() and not self._transport.is_closing()
        self._finish()

    def _finish(self) -> None:
        assert self._done is not None
        with contextlib.suppress(asyncio.InvalidStateError):  # the waiter was cancelled
            self._done.set_result(Response(self._parser.get_status_code(), self._reason, bytes(self._body)))

    def _fail(self, error: BaseException) -> None:
        assert self._done is not None
        self.reusable = False
        with contextlib.suppress(asyncio.InvalidStateError):
            self._done.set_exception(error)
        self._transport.abort()
