"""What one connection may cost, on a transport and a clock of the test's own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from hand_transport import Clock, Transport
from live_site import live_site
from patience import PATIENCE_S
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tercet.srt.entrypoints.bounded_http import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    MAX_SPARE_CONNECTIONS,
    BoundedHttpProtocol,
)

GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
CHUNKED = b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
READ = 256_000
"""What uvloop reads at most in one go."""


class Host:
    """Accepts connections, whose app notes what becomes of every request."""

    def __init__(self, runner: asyncio.Runner, *, max_connections: int | None = None, reads: bool = True) -> None:
        self._runner = runner
        self._reads = reads
        self.clock = Clock(runner.get_loop())
        self.config = uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            limit_concurrency=max_connections,
            timeout_keep_alive=75,
        )
        self.state = ServerState()
        self.bodies: list[bytes] = []
        self.headers: list[Any] = []
        self.gone = 0
        self.gate: asyncio.Event | None = None
        self.has_length = True
        """Whether a response says its length. Otherwise it has two parts."""

    def connect(self) -> tuple[BoundedHttpProtocol, Transport]:
        protocol = BoundedHttpProtocol(self.config, self.state, {}, self.clock)
        transport = Transport()
        protocol.connection_made(transport)
        return protocol, transport

    def settle(self) -> None:
        """Lets the app do what it can."""

        async def turns() -> None:
            for _ in range(500):
                await asyncio.sleep(0)

        self._runner.run(turns())

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers.append(scope["headers"])
        body = b""
        while self._reads:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        headers = [(b"content-length", b"2")] if self.has_length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.gate is not None:
            await self.gate.wait()
        if not self.has_length:
            await send({"type": "http.response.body", "body": b"so far ", "more_body": True})
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def host(runner: asyncio.Runner) -> Host:
    return Host(runner)


def feed(host: Host, protocol: BoundedHttpProtocol, transport: Transport, pieces: Iterator[bytes]) -> int:
    """Bytes that were read before the connection ended."""
    num_bytes = 0
    for piece in pieces:
        if transport.is_closing() or transport.ended:
            break
        protocol.data_received(piece)
        host.settle()
        num_bytes += len(piece)
    return num_bytes


def test_requests_and_answers(host: Host) -> None:
    protocol, transport = host.connect()
    for _ in range(3):
        protocol.data_received(GET.removesuffix(b"\r\n") + b"a:\r\n" * (MAX_HEADERS - 1) + b"\r\n")
        host.settle()
    protocol.data_received(CHUNKED + b"3;note=x\r\nabc\r\n0\r\nchecksum: 1\r\n\r\n")
    host.settle()
    assert transport.statuses == [200] * 4 and [len(one) for one in host.headers] == [MAX_HEADERS] * 3 + [2]
    assert host.bodies[3] == b"abc" and not transport.closed and not transport.ended


@pytest.mark.parametrize("keep_alive", [b"", b"Connection: keep-alive\r\n"])
def test_the_end_of_the_connection_ends_a_stream_of_an_http_1_0_client(host: Host, keep_alive: bytes) -> None:
    host.has_length = False
    protocol, transport = host.connect()
    protocol.data_received(b"GET /x HTTP/1.0\r\n" + keep_alive + b"\r\n")
    host.settle()
    head, body = transport.written.split(b"\r\n\r\n")
    assert body == b"so far ok" and transport.closed
    assert b"transfer-encoding" not in head


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: %d\r\n" % len(GET), GET),
        (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\nchecksum: 1\r\n\r\n" % (len(GET), GET)),
    ],
    ids=["length", "chunks"],
)
@pytest.mark.parametrize("size", [1, 7, READ])
def test_a_request_for_another_protocol_keeps_its_body(host: Host, size: int, framing: bytes, body: bytes) -> None:
    """Java's HttpClient asks for HTTP/2 with each request on a new connection. The body looks like a request here."""
    protocol, transport = host.connect()
    ask = b" /x HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE
    data = b"POST" + ask + framing + b"\r\n" + body + b"GET" + ask + b"\r\n" + GET
    assert feed(host, protocol, transport, (data[i : i + size] for i in range(0, len(data), size))) == len(data)
    assert transport.statuses == [200] * 3
    assert host.bodies == [GET, b"", b""]


@pytest.mark.parametrize(
    "piece",
    [b"name: value\r\n" * 100, b"a" * 10_000, b"x:" + b"y" * 10_000],
    ids=["many headers", "one endless name", "endless values"],
)
@pytest.mark.parametrize(
    "before",
    [b"GET /x HTTP/1.1\r\n", b"GET /", CHUNKED + b"0\r\n", CHUNKED + b"3\r\nabc\r\n0\r\n", CHUNKED + b"3;note="],
    ids=["head", "line", "trailers", "trailers behind a body", "extension of a chunk"],
)
def test_what_is_not_of_a_body_is_bounded(host: Host, before: bytes, piece: bytes) -> None:
    protocol, transport = host.connect()
    protocol.data_received(before)
    host.settle()
    read = feed(host, protocol, transport, iter([piece] * 200))
    assert read <= MAX_HEAD_BYTES + 2 * len(piece)
    assert transport.statuses in ([431], [400])  # not each of these pieces is HTTP everywhere
    error = json.loads(transport.written.split(b"\r\n\r\n", 1)[1])["error"]
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize("before", [b"GET /x HTTP/1.1\r\nHost: x\r\n", CHUNKED + b"0\r\n"], ids=["head", "trailers"])
@pytest.mark.parametrize("more", [-500, 500])
def test_the_limit_of_a_head_does_not_depend_on_its_reads(host: Host, before: bytes, more: int) -> None:
    protocol, transport = host.connect()
    protocol.data_received(before + b"a: " + b"b" * (MAX_HEAD_BYTES + more) + b"\r\n\r\n")
    host.settle()
    assert transport.statuses == [431 if more > 0 else 200]


def test_trailers_are_not_kept(host: Host) -> None:
    protocol, transport = host.connect()
    protocol.data_received(CHUNKED + b"0\r\n" + b"a: b\r\n" * 200)
    host.settle()
    assert len(host.headers[0]) == 2
    protocol.data_received(b"\r\n")
    host.settle()
    assert transport.statuses == [200] and len(host.headers[0]) == 2


@pytest.mark.parametrize("before", [b"GET /x HTTP/1.1\r\n", CHUNKED + b"0\r\n"])
def test_a_read_full_of_headers_is_refused_at_one_too_many(host: Host, before: bytes) -> None:
    protocol, transport = host.connect()
    protocol.data_received(before + b"a:\r\n" * (READ // 4))
    host.settle()
    assert transport.statuses == [431] and f"{MAX_HEADERS} headers".encode() in transport.written


def test_a_read_full_of_requests_is_refused_at_one_too_many(host: Host) -> None:
    protocol, transport = host.connect()
    protocol.data_received(GET * (READ // len(GET)))
    assert transport.aborted and len(protocol.pipeline) <= MAX_PIPELINED
    protocol, transport = host.connect()
    protocol.data_received(GET.replace(b"Host", UPGRADE + b"Host") * (READ // len(GET)))
    assert transport.aborted and len(protocol.pipeline) <= MAX_PIPELINED
    protocol, transport = host.connect()
    protocol.data_received(GET * MAX_PIPELINED)
    host.settle()
    assert transport.statuses == [200] * MAX_PIPELINED
    protocol, transport = host.connect()
    protocol.data_received(GET * (MAX_PIPELINED + 1))
    assert transport.aborted


def test_a_client_that_leaves_ends_all_its_requests(host: Host) -> None:
    host.gate = asyncio.Event()
    protocol, _ = host.connect()
    protocol.data_received(GET + GET + CHUNKED)
    first, second, third = protocol._unanswered
    protocol.connection_lost(None)
    assert first.disconnected and second.disconnected and third.disconnected


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_an_answer_before_the_body_ends_the_connection(runner: asyncio.Runner, version: bytes) -> None:
    """As 401 and 413 are. What is still on its way is thrown away for a while, so that the client can read it."""
    host = Host(runner, reads=False)
    protocol, transport = host.connect()
    protocol.data_received(b"POST /x HTTP/%s\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" % version + b"x" * READ)
    assert transport.paused
    host.settle()
    assert transport.statuses == [200] and transport.ended and not transport.closed and not transport.paused
    for _ in range(50):
        protocol.data_received(b"x" * READ)
    assert not transport.closed and len(protocol.cycle.body) == READ
    host.clock.advance(BoundedHttpProtocol.DISCARD_S + 0.1)
    assert transport.aborted


def test_what_is_thrown_away_is_bounded_too(runner: asyncio.Runner) -> None:
    host = Host(runner, reads=False)
    protocol, transport = host.connect()
    protocol.data_received(CHUNKED)
    host.settle()
    assert feed(host, protocol, Transport(), iter([b"x" * READ] * 80)) == 80 * READ
    assert transport.aborted


def test_a_connection_that_says_nothing_is_closed(host: Host) -> None:
    _, transport = host.connect()
    host.clock.advance(BoundedHttpProtocol.HEAD_TIMEOUT_S - 1)
    assert not transport.closed
    host.clock.advance(2)
    assert transport.closed and transport.written == b""


@pytest.mark.parametrize("before", [b"", GET, b"\r\n", GET + b"\r\n"], ids=["new", "second", "line", "second line"])
def test_a_head_that_comes_byte_by_byte_is_given_up(host: Host, before: bytes) -> None:
    protocol, transport = host.connect()
    if before:
        protocol.data_received(before)
        host.settle()
    start = host.clock.now
    for byte in b"GET /x HTTP/1.1\r\nX: " + b"y" * 10_000:
        if transport.ended:
            break
        protocol.data_received(bytes([byte]))
        host.clock.advance(1)
    assert transport.statuses[-1] == 408
    assert host.clock.now - start <= 2 * BoundedHttpProtocol.HEAD_TIMEOUT_S + 1


def test_blank_lines_do_not_keep_a_connection(host: Host) -> None:
    protocol, transport = host.connect()
    protocol.data_received(GET)
    host.settle()
    for _ in range(200):
        if transport.ended:
            break
        protocol.data_received(b"\r\n")
        host.clock.advance(1)
    assert transport.ended


def test_a_body_that_comes_byte_by_byte_is_given_up(host: Host) -> None:
    protocol, transport = host.connect()
    protocol.data_received(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        if transport.ended:
            break
        protocol.data_received(b"x")
        host.settle()
        host.clock.advance(1)
    host.settle()
    assert transport.statuses == [408] and host.gone == 1
    assert host.clock.now <= BoundedHttpProtocol.BODY_TIMEOUT_S + BoundedHttpProtocol.HEAD_TIMEOUT_S


def test_a_large_body_on_a_slow_line_arrives(host: Host) -> None:
    protocol, transport = host.connect()
    rate = BoundedHttpProtocol.MIN_BODY_RATE
    protocol.data_received(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (500 * rate))
    for _ in range(500):
        protocol.data_received(b"x" * rate)
        host.settle()
        host.clock.advance(1)
    assert transport.statuses == [200] and len(host.bodies[0]) == 500 * rate


def test_an_answer_may_take_its_time(host: Host) -> None:
    host.gate = asyncio.Event()
    protocol, transport = host.connect()
    protocol.data_received(GET + CHUNKED + b"3\r\nabc\r\n")  # the second waits for the first, and is not read meanwhile
    host.settle()
    host.clock.advance(3600)
    assert not transport.closed and not transport.ended
    host.gate.set()
    host.settle()
    protocol.data_received(b"0\r\n\r\n")
    host.settle()
    assert transport.statuses == [200, 200]
    assert not transport.closed
    host.clock.advance(74)
    assert not transport.closed
    host.clock.advance(2)
    assert transport.closed  # uvicorn's keep-alive


def test_an_answer_that_nobody_reads_ends_some_day(host: Host) -> None:
    protocol, transport = host.connect()
    protocol.data_received(b"GET /x HTTP/1.0\r\n\r\n")
    host.settle()
    transport.unsent = 1000
    assert transport.closed
    for _ in range(10):
        transport.unsent -= 10
        host.clock.advance(BoundedHttpProtocol.HEAD_TIMEOUT_S)
    assert not transport.aborted
    host.clock.advance(BoundedHttpProtocol.HEAD_TIMEOUT_S + 1)
    assert transport.aborted


def test_a_client_that_does_not_read_its_stream_is_given_up(host: Host) -> None:
    protocol, transport = host.connect()
    protocol.data_received(GET)
    transport.unsent = 100_000
    protocol.pause_writing()
    for _ in range(10):
        transport.unsent -= 10
        host.clock.advance(BoundedHttpProtocol.HEAD_TIMEOUT_S)
    assert not transport.aborted
    host.clock.advance(BoundedHttpProtocol.SEND_TIMEOUT_S - 1)
    assert not transport.aborted
    host.clock.advance(BoundedHttpProtocol.HEAD_TIMEOUT_S + 1)
    assert transport.aborted


def test_a_quiet_stream_is_not_given_up(host: Host) -> None:
    """Nothing is sent for minutes, because the model computes; a few bytes are on their way."""
    protocol, transport = host.connect()
    protocol.data_received(GET)
    transport.unsent = 100
    host.clock.advance(20 * BoundedHttpProtocol.SEND_TIMEOUT_S)
    assert not transport.aborted


def test_too_many_connections_are_told_so_and_then_not(runner: asyncio.Runner) -> None:
    host = Host(runner, max_connections=3)
    first = [host.connect() for _ in range(3)]
    told = [host.connect()[1] for _ in range(MAX_SPARE_CONNECTIONS)]
    assert all(one.statuses == [503] and b"retry-after: 1" in one.written and one.ended for one in told)
    assert host.connect()[1].aborted
    for protocol, _ in first[1:]:
        protocol.connection_lost(None)
    for protocol in list(host.state.connections)[:]:
        if protocol is not first[0][0]:
            protocol.connection_lost(None)
    assert host.connect()[1].written == b""
    first[0][0].data_received(GET)
    host.settle()
    assert first[0][1].statuses == [200]


def test_an_early_answer_reaches_a_client_that_is_still_sending() -> None:
    """Over a real socket, where a reset would destroy it."""
    with live_site(api_key="k") as live, socket.create_connection(live.address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n")
        received = b""
        for _ in range(8):
            connection.sendall(b"x" * 1_000_000)
        while piece := connection.recv(65536):
            received += piece
        assert received.startswith(b"HTTP/1.1 401 ") and received.endswith(b"}")
