"""The listening sockets, and uvicorn on one of them. Until the engine is ready, every request gets status 503."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Iterator
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import TercetError
from ..machine.open_files import raise_open_files_limit
from .bounded_http import MAX_SPARE_CONNECTIONS, BoundedHttpProtocol
from .error_handlers import error_response
from .tls_listener import TlsListener

logger = logging.getLogger(__name__)

# A server must keep idle connections longer than its load balancers and client pools do. Otherwise it may close a
# connection at the moment a client sends a request on it.
_KEEP_ALIVE_S = 75
_CLOSE_TIMEOUT_S = 2
_BACKLOG = 2048
_OTHER_FILES = 128
"""Open files other than client connections: libraries, sockets between the processes, and a reserve."""
_MIN_FILES = 256
"""With fewer open files, clients could take those that a restart of the engine needs."""
_FEW_CONNECTIONS = 4096


def bind(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free port). A restarted server can bind the same port at once. Raises OSError."""
    listener = _bound(host, port)
    _listen(listener)  # two servers may bind one port with SO_REUSEADDR, but only one can listen
    return listener


def bind_group(host: str, port: int, num_listeners: int) -> list[socket.socket]:
    """Listening sockets on one port (0: any free port), among which the kernel divides the connections evenly.

    Raises OSError if another socket listens on the port. SO_REUSEPORT alone would let two servers of one user share
    it, so a socket without that option listens first.
    """
    with bind(host, port) as first:
        port = first.getsockname()[1]
    listeners = [_bound(host, port, shared=True) for _ in range(num_listeners)]
    for listener in listeners:
        _listen(listener)
    return listeners


def _bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:  # for example an empty part, as in 127.0.0..1
        raise OSError(errno.EINVAL, "this is neither an address nor a host name") from None
    family, kind, proto, _, address = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen(listener: socket.socket) -> None:
    try:
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)


def max_connections() -> int:
    """The number of connections that this process can have, after it has raised its limit of open files.

    Raises ValueError if the limit stays too low for a server.
    """
    limit = raise_open_files_limit()
    if limit < _MIN_FILES:
        raise ValueError(f"the limit of open files (ulimit -Hn) must be at least {_MIN_FILES}, got {limit}")
    return limit - _OTHER_FILES


def warn_of_few_connections(number: int) -> None:
    if number < _FEW_CONNECTIONS:
        logger.warning(
            "The server accepts at most %d connections because the limit of open files (ulimit -Hn) is low", number
        )


def adopt_uvicorn_logs(level: str) -> None:
    """Sends uvicorn's warnings to our log."""
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers[:] = logging.getLogger("tercet").handlers
    uvicorn_logger.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    uvicorn_logger.propagate = False


class ServerStarting(TercetError):
    status: ClassVar[int] = 503
    err_type: ClassVar[str] = "service_unavailable"
    code: ClassVar[str | None] = "starting"


class HttpListener:
    """Serves one app on one socket, in the event loop in which it is made."""

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None, max_connections: int) -> None:
        self.app: ASGIApp | None = None
        """None: every request gets status 503."""
        self._uvicorn = _Uvicorn(_uvicorn_config(self._serve, tls, max_connections))
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Takes no more connections. Responses under way have two seconds to end."""
        self._uvicorn.should_exit = True
        await self._serving

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app or error_response(ServerStarting("the server is starting"))
        await app(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers. The process handles signals itself."""

    servers: list[Any]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own, with limits for handshakes, which uvicorn cannot be told."""
        assert sockets is not None
        config, loop = self.config, asyncio.get_running_loop()
        protocol: Any = config.http_protocol_class
        connect = functools.partial(protocol, config=config, server_state=self.server_state, app_state={})
        if config.ssl is None:
            self.servers = [await loop.create_server(connect, sock=one, backlog=config.backlog) for one in sockets]
        else:
            self.servers = [TlsListener(one, config.ssl, connect, self._has_room) for one in sockets]
        self.started = True

    def _has_room(self, num_handshakes: int) -> bool:
        """Whether another connection may begin its handshake. At its end, it may be told that it is one too many."""
        limit = self.config.limit_concurrency
        assert limit is not None
        return len(self.server_state.connections) + num_handshakes < limit + MAX_SPARE_CONNECTIONS


def _uvicorn_config(app: ASGIApp, tls: ssl.SSLContext | None, max_connections: int) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,  # request_log.py writes it
        server_header=False,
        proxy_headers=False,
        limit_concurrency=max_connections,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    config.load()
    config.ssl = tls
    return config
