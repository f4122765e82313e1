"""HTTP connections with limits on memory and time. uvicorn's own protocol has almost none.

These limits hold before a request is decoded and its API key is checked:

- Memory: MAX_HEAD_BYTES for the path and headers, and for the trailers. At most one read more is kept while one of
  these, or what is between two chunks of a body, is incomplete. Trailers are dropped, as RFC 9110 (6.5.1) allows.
- Number: MAX_HEADERS headers, and MAX_PIPELINED unanswered requests.
- Output: the response stops writing while more than 64 KiB are unsent. After SEND_TIMEOUT_S without progress, the
  connection is reset.
- Time: HEAD_TIMEOUT_S for a head. A body has BODY_TIMEOUT_S, plus one second for each MIN_BODY_RATE bytes received.

A request for another protocol (`Upgrade`) is answered as if it did not ask for one, as RFC 9110 (7.8) allows. Java's
HttpClient asks for HTTP/2 with each request on a new connection. httptools would take the body for the other protocol.

A response that is sent before its request has been read completely ends the connection. A reset at once could destroy
the response before the client has read it. So the connection is closed for writing, and its input is discarded for
DISCARD_S. With TLS, nothing can be closed for writing alone: the client sees the end after DISCARD_S.

A client of HTTP/1.0 knows no chunks. The end of the connection ends a response of unknown length (RFC 9112, 6.3).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..errors import InvalidRequest, QueueFull, TercetError
from .error_handlers import RETRY_AFTER_S, HeadTooLarge, RequestTimeout, envelope

MAX_HEAD_BYTES = 1 << 16
_TOO_LARGE = f"the request head or trailers must have at most {MAX_HEAD_BYTES} bytes"
MAX_HEADERS = 256
MAX_PIPELINED = 64
MAX_SPARE_CONNECTIONS = 32
"""Number of connections beyond the limit that get an error response. Further ones are closed without a response."""
_MAX_DISCARDED_BYTES = 1 << 24
CLOSE = "tercet.close"
"""In the scope of a request: a function that closes its connection after what has been written."""


class _Refused(Exception):
    """Stops the HTTP parser."""


class _ResponseTransport:
    """The transport that uvicorn's response writes to. Its `close` calls the protocol, not the transport."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Http10Response:
    """Writes the response to a request of HTTP/1.0."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._has_length = True

    async def send(self, message: Message) -> None:
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # as uvicorn checks it
        await self._send(message)  # type: ignore[arg-type]


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn's `limit_concurrency` is the maximum number of connections (None: no limit)."""

    HEAD_TIMEOUT_S: ClassVar[float] = 30.0
    """Time limit for a request's head, and for the first byte of a new connection."""
    BODY_TIMEOUT_S: ClassVar[float] = 60.0
    MIN_BODY_RATE: ClassVar[int] = 1 << 14
    """Bytes per second."""
    SEND_TIMEOUT_S: ClassVar[float] = 60.0
    """How long a client may read nothing while its response waits. It is checked every HEAD_TIMEOUT_S."""
    DISCARD_S: ClassVar[float] = 2.0
    """How long the input is discarded after an early response."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = self.limit_concurrency
        self.limit_concurrency = None  # uvicorn would answer too late, and not in the envelope
        self._in_head = True
        self._is_known_head = False
        """The parser reads a head that has been handled."""
        self._num_headers = 0
        self._num_head_bytes = 0
        """Bytes of the path and headers, or of the trailers, so far."""
        self._num_body_bytes = 0
        self._num_non_body_bytes = 0
        """Bytes received since the last byte of a body, or since the message began."""
        self._waiting_since: float | None = None
        """Start time of the message that is being received; None while no message is awaited."""
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests with a complete head and no complete response, oldest first. The first one is being answered."""
        self._refusal: TercetError | None = None
        self._num_discarded_bytes: int | None = None
        """Bytes discarded after an early response; None if there was no early response."""
        self._timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        self._unsent_since = 0.0
        """When the number of unsent bytes last changed, or writing was last possible."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._response_transport = _ResponseTransport(transport, self._close_after_answer)
        self._waiting_since = self.loop.time()
        self._timer = self.loop.call_later(self.HEAD_TIMEOUT_S, self._check_deadline)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            if len(self.connections) > self._max_connections + MAX_SPARE_CONNECTIONS:
                transport.abort()
            else:
                self._refuse(QueueFull(f"the server has reached its limit of {self._max_connections} connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._unset_keepalive_if_required()
        self._end_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._num_discarded_bytes is not None:
            self._num_discarded_bytes += len(data)
            if self._num_discarded_bytes > _MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        if self._waiting_since is None:
            self._waiting_since = self.loop.time()
        self._num_non_body_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._refuse(self._refusal or InvalidRequest("this is not a valid HTTP request"))
        if (
            self._num_non_body_bytes > MAX_HEAD_BYTES
            and self._num_discarded_bytes is None
            and not self.transport.is_closing()
        ):
            self._refuse(HeadTooLarge(_TOO_LARGE))

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._replace_parser()

    def _replace_parser(self) -> None:
        """Continues after a head with `Upgrade`, with a parser that knows only how long the body is."""
        framing = [b"%s: %s\r\n" % one for one in self.headers if one[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._is_known_head = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        self._is_known_head = False

    # Callbacks of the HTTP parser

    def on_message_begin(self) -> None:
        if self._is_known_head:
            return
        super().on_message_begin()
        self._num_headers = self._num_head_bytes = self._num_body_bytes = 0
        self._waiting_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        if not self._is_known_head:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_known_head:
            return
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refusal = HeadTooLarge(f"a request must have at most {MAX_HEADERS} headers")
            raise _Refused
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if self._in_head:
            super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        """The same head is refused however many reads it comes in."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refusal = HeadTooLarge(_TOO_LARGE)
            raise _Refused

    def on_headers_complete(self) -> None:
        if self._is_known_head:
            return
        if len(self._unanswered) >= MAX_PIPELINED:
            self._refusal = HeadTooLarge(f"a connection must have at most {MAX_PIPELINED} unanswered requests")
            raise _Refused
        super().on_headers_complete()
        self._in_head = False
        self._num_head_bytes = 0
        self.cycle.transport = self._response_transport  # type: ignore[assignment]
        self.cycle.scope[CLOSE] = self.transport.close  # type: ignore[literal-required]
        self._unanswered.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Http10Response(self.cycle).send  # type: ignore[assignment, method-assign]

    def on_body(self, body: bytes) -> None:
        self._num_non_body_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the body follows: _replace_parser
        super().on_message_complete()
        self._in_head = True  # of the next request
        self._num_non_body_bytes = 0
        self._waiting_since = None

    # The end of a response and of the connection

    def on_response_complete(self) -> None:
        answered = self._unanswered.popleft()
        super().on_response_complete()
        if answered.more_body:
            self._discard_input()

    def _close_after_answer(self) -> None:
        if self._unanswered and self._unanswered[0].more_body:
            self._discard_input()
        else:
            self.transport.close()

    def _refuse(self, error: TercetError) -> None:
        """Sends an error and discards the rest of the input. If a response is being sent, resets the connection."""
        is_answering = len(self._unanswered) > 1 or any(cycle.response_started for cycle in self._unanswered)
        self._end_requests()
        if is_answering:
            self.transport.abort()
        else:
            self.transport.write(_raw_answer(error))
            self._discard_input()

    def _end_requests(self) -> None:
        """Tells the handlers of all open requests that the client is gone. uvicorn tells only the newest one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def _discard_input(self) -> None:
        if self._num_discarded_bytes is not None or self.transport.is_closing():
            return
        self._num_discarded_bytes = 0
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS has no half-closed connection
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.DISCARD_S, self.transport.abort)

    def _check_deadline(self) -> None:
        """Ends a connection that is past its deadline. It runs at intervals, so that requests need no timers."""
        now = self.loop.time()
        next_s = self.HEAD_TIMEOUT_S
        num_unsent = self.transport.get_write_buffer_size()
        is_stuck = num_unsent == self._num_unsent
        if not is_stuck or not self.flow.write_paused:
            self._unsent_since = now
        if (is_stuck and self.transport.is_closing()) or now - self._unsent_since >= self.SEND_TIMEOUT_S:
            self.transport.abort()  # the client does not read its response
            return
        self._num_unsent = num_unsent
        is_behind_another = len(self._unanswered) > (0 if self._in_head else 1)
        if self._waiting_since is not None and (is_behind_another or self.flow.read_paused):
            self._waiting_since = now  # the server, not the client, causes the wait
        elif self._waiting_since is not None:
            left_s = self._waiting_since + self._allowed_s() - now
            if left_s <= 0:
                self._time_out()
                return
            next_s = min(next_s, left_s)
        self._timer = self.loop.call_later(next_s, self._check_deadline)

    def _allowed_s(self) -> float:
        if self._in_head:
            return self.HEAD_TIMEOUT_S
        return self.BODY_TIMEOUT_S + self._num_body_bytes / self.MIN_BODY_RATE

    def _time_out(self) -> None:
        if self._in_head and self._num_non_body_bytes == 0:
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"the request did not arrive within {self._allowed_s():.0f} s"))


def _raw_answer(error: TercetError) -> bytes:
    body = envelope(error)
    head = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
    if error.status == 503:
        head.append(b"retry-after: %d" % RETRY_AFTER_S)
    return STATUS_LINE[error.status] + b"\r\n".join([*head, b"", body])
