"""The HTTP client against a server that splits, delays, breaks off and lies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import uvloop
from patience import PATIENCE_S
from scripted_http import Exchange, ScriptedServer, scripted_server

from tercet.benchmarks.http_client import HttpClient, HttpError, Response

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, PATIENCE_S))


def ask(url: str, path: str = "/x", body: bytes = b"") -> Response:
    async def work() -> Response:
        client = HttpClient(url)
        try:
            return await client.request("POST", path, body)
        finally:
            await client.close()

    return run(work())


def test_a_request_says_what_it_is_told() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer({"got": exchange.json})

    async def work(url: str) -> Response:
        client = HttpClient(f"{url}/base/", {"Authorization": "Bearer k"})
        answer = await client.request("POST", "/x?y=1", b'{"a":1}')
        await client.close()
        return answer

    with scripted_server(script) as server:
        answer = run(work(server.url))
        exchange = server.seen[0]
    assert (answer.status, answer.reason, answer.body) == (200, "OK", b'{"got": {"a": 1}}')
    assert (exchange.method, exchange.path) == ("POST", "/base/x?y=1")
    assert exchange.headers["authorization"] == "Bearer k"
    assert exchange.headers["content-type"] == "application/json"
    assert exchange.headers["host"] == server.url.removeprefix("http://")


def test_a_given_header_replaces_one_of_the_same_name() -> None:
    heads: list[list[str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heads.append([line for line in head.split("\r\n") if line.lower().startswith(("host:", "authorization:"))])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async def work() -> Response:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        headers = {"Authorization": "Bearer a", "host": "x.test", "authorization": "Bearer b"}
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", headers)
        async with server:
            return await client.request("GET", "/x")

    assert run(work()).status == 200
    assert heads == [["host: x.test", "authorization: Bearer b"]]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_an_answer_may_come_in_any_pieces(step: int) -> None:
    wire = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 Fine by me\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\ndefgh\r\n0\r\n\r\n"
    )

    async def script(exchange: Exchange) -> None:
        for i in range(0, len(wire), step):
            await exchange.send(wire[i : i + step])
            await asyncio.sleep(0.0005)

    async def work(url: str) -> tuple[Response, list[tuple[bytes, float]]]:
        client = HttpClient(url)
        pieces: list[tuple[bytes, float]] = []
        answer = await client.stream("/x", b"", lambda data, now: pieces.append((data, now)))
        await client.close()
        return answer, pieces

    with scripted_server(script) as server:
        answer, pieces = run(work(server.url))
    assert (answer.status, answer.reason, answer.body) == (200, "Fine by me", b"")
    assert b"".join(data for data, _ in pieces) == b"abcdefgh"
    times = [now for _, now in pieces]
    assert times == sorted(times) and times[0] > 0


def test_connections_are_kept_and_shared_out() -> None:
    async def script(exchange: Exchange) -> None:
        while len(server.seen) % 4:
            await asyncio.sleep(0.001)
        await exchange.answer(b"ok")

    async def work(url: str) -> None:
        client = HttpClient(url)
        for _ in range(3):
            await asyncio.gather(*(client.request("GET", "/") for _ in range(4)))
        await client.close()

    with scripted_server(script) as server:
        run(work(server.url))
        assert len(server.seen) == 12
        assert {exchange.connection for exchange in server.seen} == {0, 1, 2, 3}


@pytest.mark.parametrize("told", [True, False])
def test_a_connection_that_the_server_gave_up_is_replaced(told: bool) -> None:
    """Whether it said so, as llama.cpp's does not, or hangs up in the moment of the next request."""

    async def script(exchange: Exchange) -> None:
        if exchange.number == 1 and not told:
            exchange.hang_up()
            return
        close = b"Connection: close\r\n" if told else b""
        await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + close + b"\r\nok")
        if told:
            exchange.hang_up()

    async def work(url: str) -> list[bytes]:
        client = HttpClient(url)
        answers = [(await client.request("GET", "/")).body for _ in range(2)]
        await client.close()
        return answers

    with scripted_server(script) as server:
        assert run(work(server.url)) == [b"ok", b"ok"]
        assert [exchange.connection for exchange in server.seen] == ([0, 1] if told else [0, 0, 1])


def test_a_body_may_last_until_the_connection_ends() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        exchange.writer.close()

    with scripted_server(script) as server:
        assert ask(server.url).body == b"all of it"


@pytest.mark.parametrize(
    "wire, message",
    [
        (b"", "without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", "in the middle"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "in the middle"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(wire: bytes, message: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(wire)
        exchange.writer.close()

    with scripted_server(script) as server, pytest.raises(HttpError, match=message):
        ask(server.url)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(HttpError, match=f"could not connect to http://127.0.0.1:{port}: "):
        ask(f"http://127.0.0.1:{port}")
    with pytest.raises(HttpError, match="could not connect to"):
        ask("http://no-such-host.invalid")


class SlowLoop(uvloop.Loop):
    """Hands over a new connection only after the other side has closed it."""

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **options)
        while not transport.is_closing():
            await asyncio.sleep(0.001)
        return transport, protocol


def test_a_connection_that_is_closed_before_the_request_is_written() -> None:
    """A server that dies may accept a connection and reset it at once."""

    async def work() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.transport.abort(), "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(HttpError, match="without an answer"):
            await client.request("POST", "/x")
        server.close()

    with asyncio.Runner(loop_factory=SlowLoop) as runner:
        runner.run(asyncio.wait_for(work(), PATIENCE_S))


def test_only_a_200_is_streamed() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"too many", "429 Slow down")

    async def work(url: str) -> Response:
        client = HttpClient(url)
        answer = await client.stream("/", b"", lambda data, now: pytest.fail("not for the stream"))
        await client.close()
        return answer

    with scripted_server(script) as server:
        answer = run(work(server.url))
    assert (answer.status, answer.reason, answer.body) == (429, "Slow down", b"too many")


def test_an_error_of_the_reader_comes_out_and_ends_the_exchange() -> None:

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        while True:
            await exchange.piece(b"more")
            await asyncio.sleep(0.01)

    def reader(data: bytes, now: float) -> None:
        raise KeyError("mine")

    async def work(server: ScriptedServer) -> None:
        client = HttpClient(server.url)
        with pytest.raises(KeyError, match="mine"):
            await client.stream("/", b"", reader)
        while server.left != [0]:
            await asyncio.sleep(0.01)
        await client.close()

    with scripted_server(script) as server:
        run(work(server))


def test_cancelling_hangs_up_and_the_client_goes_on() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.number > 0:
            await exchange.answer(b"ok")

    async def work(server: ScriptedServer) -> bytes:
        client = HttpClient(server.url)
        waiting = asyncio.create_task(client.request("GET", "/"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while server.left != [0]:
            await asyncio.sleep(0.01)
        answer = await client.request("GET", "/")
        await client.close()
        return answer.body

    with scripted_server(script) as server:
        assert run(work(server)) == b"ok"
        assert [exchange.connection for exchange in server.seen] == [0, 1]


@pytest.mark.parametrize(
    "url", ["localhost:30000", "ftp://x", "http://", "http://x:y", "http://x?a=1", "http://x:99999", "http://u:p@x"]
)
def test_a_base_url_has_to_be_one(url: str) -> None:
    with pytest.raises(ValueError, match="base URL"):
        HttpClient(url)


@pytest.mark.parametrize("header", [("X", "a\r\nY: b"), ("a b", "c"), ("", "c"), ("é", "c")])
def test_a_header_has_to_be_one(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="invalid header"):
        HttpClient("http://x", dict([header]))
