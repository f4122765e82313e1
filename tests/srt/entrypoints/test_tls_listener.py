"""Handshakes: their time, their number, and the lack of open files. A server in this process, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from certificates import make_certificate
from patience import PATIENCE_S

from tercet.srt.entrypoints import http_listener, tls_listener
from tercet.srt.entrypoints.tls import tls_context
from tercet.srt.server_args import ServerArgs

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl program is not installed")


class Site:
    """A server of TLS connections that gives every request status 503."""

    def __init__(self, address: tuple[str, int], trust: ssl.SSLContext) -> None:
        self.address = address
        self._trust = trust

    async def silent(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that begins no handshake."""
        return await asyncio.open_connection(*self.address)

    async def ask(self) -> bytes:
        """The first line of an answer. b"": the server closes the connection without one."""
        try:
            reader, writer = await asyncio.open_connection(*self.address, ssl=self._trust)
            try:
                writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                return await reader.readline()
            finally:
                writer.close()
        except OSError:
            return b""


def visit(folder: Path, listener: socket.socket, clients: Callable[[Site], Awaitable[None]]) -> None:
    """Runs the clients while a server that may have one connection listens on this socket."""
    make_certificate(folder, "server")
    pem, key = str(folder / "server.pem"), str(folder / "server.key")
    context = tls_context(ServerArgs(model_path="m", ssl_certfile=pem, ssl_keyfile=key))

    async def scenario() -> None:
        server = http_listener.HttpListener(listener, context, 1)
        try:
            site = Site(listener.getsockname(), ssl.create_default_context(cafile=pem))
            await asyncio.wait_for(clients(site), PATIENCE_S)
        finally:
            await server.stop()

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_handshake_that_stalls_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def clients(site: Site) -> None:
        reader, writer = await site.silent()
        with contextlib.suppress(ConnectionResetError):
            # Without a limit of its own, the event loop gives a handshake up after 60 s.
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()

    visit(tmp_path, http_listener.bind("127.0.0.1", 0), clients)


def test_connections_whose_handshake_is_under_way_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_S", 10 * PATIENCE_S)
    monkeypatch.setattr(http_listener, "MAX_SPARE_CONNECTIONS", 1)

    async def clients(site: Site) -> None:
        places = [await site.silent() for _ in range(2)]
        reader, writer = await site.silent()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        for _, writer in places:
            writer.close()
        while not await site.ask():  # until the server has seen that they have left
            await asyncio.sleep(0.01)

    visit(tmp_path, http_listener.bind("127.0.0.1", 0), clients)


class _FewFiles(socket.socket):
    """A listening socket of a process that has no file left for the first connection."""

    num_refused = 0

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if not self.num_refused:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_connection_waits_until_there_is_a_file_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_listener, "_RETRY_S", 0.01)
    listener = _FewFiles(fileno=http_listener.bind("127.0.0.1", 0).detach())
    listener.setblocking(False)

    async def clients(site: Site) -> None:
        assert b" 503 " in await site.ask()

    with caplog.at_level("WARNING", "tercet"):
        visit(tmp_path, listener, clients)
    assert listener.num_refused == 1
    assert "Cannot accept a connection: Too many open files; trying again in 0.01 s" in caplog.text
