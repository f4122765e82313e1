"""One HTTP connection, and what it may cost: uvicorn's protocol itself has no limits but that on a body.

What a connection may cost before its request is known and its API key is checked:

- A request line and headers, a trailer, and what stands between two pieces of a chunked body: 64 KiB each, plus at most
  one read. Trailers are dropped, as RFC 9110 (6.5.1) allows.
- MAX_HEADERS headers, MAX_PIPELINED requests that wait for the answer to an earlier one.
- HEAD_TIMEOUT_S for a head. For a body BODY_TIMEOUT_S, and a second more for each MIN_BODY_RATE bytes that have come.

An answer that comes before its request has been read ends the connection. The connection is not reset at once, because
a client may not have read the answer: it is closed for writing, and what still comes is thrown away for a while.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ..errors import InvalidRequest, QueueFull, TercetError
from .error_handlers import RETRY_AFTER_S, HeadTooLarge, RequestTimeout, envelope

MAX_HEAD_BYTES = 1 << 16
MAX_HEADERS = 256
MAX_PIPELINED = 64
MAX_SPARE_CONNECTIONS = 32
"""Connections beyond the limit that are told so. Further ones are closed without a word."""
_MAX_THROWN_AWAY_BYTES = 1 << 24


class _Refused(Exception):
    """Ends the parser's run."""


class _ResponseTransport:
    """The connection as uvicorn's response sees it: closing it is the protocol's affair."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn's `limit_concurrency` is the number of connections at once (None: any number)."""

    HEAD_TIMEOUT_S: ClassVar[float] = 30.0
    """For a request's head, and for the first byte of a new connection."""
    BODY_TIMEOUT_S: ClassVar[float] = 60.0
    MIN_BODY_RATE: ClassVar[int] = 1 << 14
    """Bytes a second."""
    THROW_AWAY_S: ClassVar[float] = 2.0
    """How long what comes behind an early answer is read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = self.limit_concurrency
        self.limit_concurrency = None  # uvicorn would answer too late, and not in the envelope
        self._in_head = True
        self._num_headers = 0
        self._num_body_bytes = 0
        self._num_other_bytes = 0
        """Since the last byte of a body, or since the message began."""
        self._waiting_since: float | None = None
        """When the message began that the client has not sent to its end; None: nothing is awaited of it."""
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests whose heads are there, the oldest first: that is the one being answered."""
        self._refusal: TercetError | None = None
        self._thrown_away: int | None = None
        """Bytes that came behind an early answer; None: there was none."""
        self._timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._response_transport = _ResponseTransport(transport, self._close_after_answer)
        self._waiting_since = self.loop.time()
        self._timer = self.loop.call_later(self.HEAD_TIMEOUT_S, self._look_at_clock)
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
        if self._thrown_away is not None:
            self._thrown_away += len(data)
            if self._thrown_away > _MAX_THROWN_AWAY_BYTES:
                self.transport.abort()
            return
        if self._waiting_since is None:
            self._waiting_since = self.loop.time()
        self._num_other_bytes += len(data)
        super().data_received(data)
        if self._num_other_bytes > MAX_HEAD_BYTES and self._thrown_away is None and not self.transport.is_closing():
            self._refuse(HeadTooLarge(f"the request head or trailers must have at most {MAX_HEAD_BYTES} bytes"))

    # What the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = self._num_body_bytes = 0
        self._waiting_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refusal = HeadTooLarge(f"a request must have at most {MAX_HEADERS} headers")
            raise _Refused
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self._unanswered) > MAX_PIPELINED:
            self._refusal = HeadTooLarge(f"a connection must have at most {MAX_PIPELINED} unanswered requests")
            raise _Refused
        super().on_headers_complete()
        self._in_head = False
        self.cycle.transport = self._response_transport  # type: ignore[assignment]
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_other_bytes = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True  # the next one's
        self._num_other_bytes = 0
        self._waiting_since = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or InvalidRequest("this is not a valid HTTP request"))

    # Ends

    def on_response_complete(self) -> None:
        answered = self._unanswered.popleft()
        super().on_response_complete()
        if answered.more_body:
            self._throw_away_the_rest()

    def _close_after_answer(self) -> None:
        if self._unanswered and self._unanswered[0].more_body:
            self._throw_away_the_rest()
        else:
            self.transport.close()

    def _refuse(self, error: TercetError) -> None:
        """Answers what is no request, or is not read to its end. Where another answer is under way, it is cut off."""
        is_answering = len(self._unanswered) > 1 or any(one.response_started for one in self._unanswered)
        self._end_requests()
        if is_answering:
            self.transport.abort()
        else:
            self.transport.write(_raw_answer(error))
            self._throw_away_the_rest()

    def _end_requests(self) -> None:
        """Their handlers learn that the client is gone. uvicorn would tell the youngest alone."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def _throw_away_the_rest(self) -> None:
        if self._thrown_away is not None or self.transport.is_closing():
            return
        self._thrown_away = 0
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.THROW_AWAY_S, self.transport.abort)

    def _look_at_clock(self) -> None:
        """Runs once in a while, so that a request costs no timer."""
        now = self.loop.time()
        next_s = self.HEAD_TIMEOUT_S
        num_unsent = self.transport.get_write_buffer_size()
        if self.transport.is_closing() and num_unsent == self._num_unsent:
            self.transport.abort()  # the client does not read the end of its answer
            return
        self._num_unsent = num_unsent
        is_behind_another = len(self._unanswered) > (0 if self._in_head else 1)
        if self._waiting_since is not None and (is_behind_another or self.flow.read_paused):
            self._waiting_since = now  # it is the server that takes its time
        elif self._waiting_since is not None:
            left_s = self._waiting_since + self._allowed_s() - now
            if left_s <= 0:
                self._time_out()
                return
            next_s = min(next_s, left_s)
        self._timer = self.loop.call_later(next_s, self._look_at_clock)

    def _allowed_s(self) -> float:
        if self._in_head:
            return self.HEAD_TIMEOUT_S
        return self.BODY_TIMEOUT_S + self._num_body_bytes / self.MIN_BODY_RATE

    def _time_out(self) -> None:
        if self._in_head and self._num_other_bytes == 0:
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"the request did not arrive within {self._allowed_s():.0f} s"))


def _raw_answer(error: TercetError) -> bytes:
    body = envelope(error)
    head = [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
    if error.status == 503:
        head.append(b"retry-after: %d" % RETRY_AFTER_S)
    return STATUS_LINE[error.status] + b"\r\n".join([*head, b"", body])
