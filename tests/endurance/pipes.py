"""Connections of hostile clients, which decide about each byte: TCP, and TLS on top of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

_PIECE = 1 << 16


class Pipe:
    """A connection without TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, url: str) -> Self:
        """Raises OSError."""
        place = urlsplit(url)
        return cls(*await asyncio.open_connection(place.hostname, place.port))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def end(self) -> None:
        """Closes the own side. The server can still answer."""
        self._writer.write_eof()

    async def receive(self) -> bytes:
        """The next bytes; none at the end."""
        return await self._reader.read(_PIECE)

    def leave(self) -> None:
        self._writer.transport.abort()


class TlsPipe(Pipe):
    """A connection with TLS. `bare` is the one below it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.bare = Pipe(reader, writer)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=_host_of(writer))

    async def handshake(self) -> None:
        """Raises OSError: SSLError is one."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                await self._feed()
            else:
                self._flush()
                return

    def send(self, data: bytes) -> None:
        """At most 2**14 bytes make one record."""
        if data:
            self._tls.write(data)
        self._flush()

    def end(self) -> None:
        """Says so by close_notify."""
        with contextlib.suppress(ssl.SSLError):  # it waits for the notice of the server, which `receive` reads
            self._tls.unwrap()
        self._flush()
        super().end()

    async def receive(self) -> bytes:
        while True:
            try:
                return self._tls.read(_PIECE)
            except ssl.SSLWantReadError:
                self._flush()
                await self._feed()
            except ssl.SSLZeroReturnError:
                return b""

    async def _feed(self) -> None:
        data = await self._reader.read(_PIECE)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            self._writer.write(data)


def _host_of(writer: asyncio.StreamWriter) -> str:
    return writer.get_extra_info("peername")[0]


def make_certificate(folder: Path) -> list[str]:
    """Makes a certificate for 127.0.0.1 with the `openssl` program. Returns the flags of a server that uses it."""
    certificate, key = folder / "server.pem", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=fuzz"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]


@contextlib.contextmanager
def trusted(certificate: str) -> Iterator[None]:
    """All TLS clients of this process trust the certificate: OpenSSL reads the variable."""
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = certificate
    try:
        yield
    finally:
        if before is None:
            del os.environ["SSL_CERT_FILE"]
        else:
            os.environ["SSL_CERT_FILE"] = before
