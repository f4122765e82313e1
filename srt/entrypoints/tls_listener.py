"""Accepts TLS connections. Those whose handshake is under way count for the maximum number of connections, too.

The event loop's own server would take any number of them, and each is an open file. A process that has no file left
cannot start others, so it could not restart the engine, and libzmq would end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""Time limit for the handshake of a connection."""
_RETRY_S = 1.0
"""How long no connection is accepted after the process or the machine had too few resources for one."""
_FEW_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TlsListener:
    """Accepts the connections of one listening socket, from when it is made until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
    ) -> None:
        """`has_room`: whether one more connection may be taken beside this number of handshakes. Others are closed."""
        self._listener = listener
        self._tls = tls
        self._make_protocol = make_protocol
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accepts no more connections, and ends those whose handshake is under way."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Waits until the handshakes have ended."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FEW_RESOURCES:
                logger.warning("Cannot accept a connection: %s; trying again in %g s", error.strerror, _RETRY_S)
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(_RETRY_S, self._listen)
            return  # otherwise, the client has left already
        if not self._has_room(len(self._handshakes)):
            connection.close()
            return
        connection.setblocking(False)
        handshake = self._loop.create_task(self._shake_hands(connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # all that a client can do wrong; ssl's errors and TimeoutError are OSErrors
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
