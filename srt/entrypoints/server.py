"""`tercet serve`: runs the engine and the HTTP server in one event loop, from start-up to shutdown.

The server binds its port first. Until the engine is ready, it answers every request with 503, so that a load balancer's
health checks fail. Exit codes: 0 after SIGTERM or Ctrl-C, 1 when the start fails or the engine dies, 128 + signal when
a signal ends the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ...managers.tokenizer_manager import TokenizerManager
from .. import log
from ..errors import EngineDead, TercetError
from ..machine.open_files import raise_open_files_limit
from ..server_args import ServerArgs
from .answer_settings import answer_settings
from .bounded_http import BoundedHttpProtocol
from .engine_core import EngineCore
from .http_server import create_app
from .processes import CHILD_MODULE
from .saved_streams import SavedStreams
from .stream_journal import StreamJournal
from .tls import tls_context
from .tracing import RequestTracer

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0
"""How long running requests may continue after SIGTERM. A second signal ends them at once."""
GRACE_AFTER_DEATH_S = 2.5
"""How long `/health` answers 503 after a child process has died, so that load balancers notice."""
# A server must keep idle connections longer than its load balancers and client pools do. Otherwise it may close a
# connection at the moment a client sends a request on it.
_KEEP_ALIVE_S = 75
_CLOSE_TIMEOUT_S = 2
_DRAIN_POLL_S = 0.02
_BACKLOG = 2048
_OTHER_FILES = 128
"""Open files other than client connections: libraries, sockets between the processes, and a reserve."""
_FEW_CONNECTIONS = 4096


def serve(server_args: ServerArgs, *, child_module: str = CHILD_MODULE) -> int:
    """Serves until a signal comes or the engine dies. Returns the process' exit code.

    `child_module`: the module that a child process runs; tests replace it.
    """
    log.configure("http", server_args.log_level, server_args.log_format)
    _adopt_uvicorn_logs(server_args.log_level)
    try:
        tls = tls_context(server_args)
        tracer = RequestTracer.start(server_args)
    except ValueError as error:
        logger.error("Cannot start: %s", error)
        return 1
    max_connections = max(raise_open_files_limit() - _OTHER_FILES, 1)
    try:
        listener = bind(server_args.host, server_args.port)
    except OSError as error:
        logger.error("Cannot listen on %s:%d: %s", server_args.host, server_args.port, error.strerror or error)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_ServerRun(server_args, listener, tls, tracer, child_module, max_connections).run())
    if tracer is not None:
        tracer.close()
    return code


def bind(host: str, port: int) -> socket.socket:
    """A listening socket (port 0: any free port). A restarted server can bind the same port at once. Raises OSError."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two servers may bind one port with SO_REUSEADDR, but only one can listen
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _adopt_uvicorn_logs(level: str) -> None:
    """Sends uvicorn's warnings to our log."""
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers[:] = logging.getLogger("tercet").handlers
    uvicorn_logger.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    uvicorn_logger.propagate = False


class _Gate:
    """The ASGI application that uvicorn runs: it answers 503 until the engine's app is set."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if app is None:
            error = {
                "message": "the server is starting",
                "type": EngineDead.err_type,
                "param": None,
                "code": "starting",
            }
            app = JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "1"})
        await app(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers. `_ServerRun` handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ServerRun:
    """One run of the server, from the first request to the exit code."""

    def __init__(
        self,
        server_args: ServerArgs,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        tracer: RequestTracer | None,
        child_module: str,
        max_connections: int,
    ) -> None:
        self._server_args = server_args
        self._listener = listener
        self._tls = tls
        self._tracer = tracer
        self._child_module = child_module
        self._max_connections = max_connections
        self._gate = _Gate()
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)
        http = _Uvicorn(self._uvicorn_config())
        serving = loop.create_task(http.serve(sockets=[self._listener]))
        try:
            return await self._run_engine()
        finally:
            http.should_exit = True
            await serving

    async def _run_engine(self) -> int:
        path = self._server_args.resume_file
        try:
            journal = None if path is None else await asyncio.to_thread(StreamJournal.open, Path(path))
        except (ValueError, OSError) as error:
            logger.error("Cannot start: --resume-file: %s", error)
            return 1
        try:
            return await self._run_engine_with(journal)
        finally:
            if journal is not None:
                journal.close()

    async def _run_engine_with(self, journal: StreamJournal | None) -> int:
        starting = asyncio.create_task(EngineCore.start(self._server_args, child_module=self._child_module))
        await self._wait_for_signal_or(starting)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop()
            return 128 + self._signals[0]
        try:
            core = starting.result()
        except (ValueError, OSError, TercetError) as error:
            logger.error("Cannot start: %s", error)
            return 1
        try:
            try:
                saved = None if journal is None else await self._saved_streams(journal, core.tokenizer_manager)
            except OSError as error:  # a file of the model has become unreadable
                logger.error("Cannot start: %s", error)
                return 1
            self._gate.app = create_app(core.tokenizer_manager, tracer=self._tracer, saved=saved)
            if self._max_connections < _FEW_CONNECTIONS:
                logger.warning(
                    "The server accepts at most %d connections because the limit of open files (ulimit -Hn) is low",
                    self._max_connections,
                )
            logger.info("Tercet is ready: %s (model %s)", self._url(), self._server_args.model_name)
            await self._wait_for_signal_or(core.died)
            if core.died.done():
                await self._wait_for_signal(GRACE_AFTER_DEATH_S)
                return 1
            if saved is not None:
                saved.streams.drain()
            await self._drain(core)
            return 0
        finally:
            await core.stop()

    async def _saved_streams(self, journal: StreamJournal, manager: TokenizerManager) -> SavedStreams:
        args = manager.server_args
        settings = await asyncio.to_thread(answer_settings, args, manager.model_config, manager.facts)
        saved = SavedStreams(journal, settings, args.resume_grace)
        saved.begin_grace()
        return saved

    async def _drain(self, core: EngineCore) -> None:
        """Refuses new requests and waits until the running ones have finished.

        Returns early after DRAIN_TIMEOUT_S, at a second signal, when the engine dies, and while generation is paused.
        """
        manager = core.tokenizer_manager
        manager.draining = True
        logger.info("Shutting down; waiting for %d requests", manager.num_unfinished)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while manager.num_unfinished and len(self._signals) < 2 and not core.died.done() and not manager.pause.is_on:
            if time.monotonic() > deadline:
                logger.warning("%d requests did not finish before the shutdown timeout", manager.num_unfinished)
                break
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _wait_for_signal_or(self, work: asyncio.Future[Any]) -> None:
        """Waits until the work is done or a signal has come."""
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait([work, signalled], return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()

    async def _wait_for_signal(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signalled.wait(), timeout_s)

    def _on_signal(self, signum: signal.Signals) -> None:
        self._signals.append(signum)
        self._signalled.set()

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _uvicorn_config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            self._gate,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # request_log.py writes it
            server_header=False,
            proxy_headers=False,
            limit_concurrency=self._max_connections,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
        config.load()
        config.ssl = self._tls
        return config
