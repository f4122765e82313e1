"""`tercet serve`: runs the engine and the HTTP server in one event loop, from start-up to shutdown.

The server binds its port first. Until the engine is ready, it answers every request with 503, so that a load balancer's
health checks fail. With `--tokenizer-worker-num`, other processes serve HTTP (http_workers.py). Exit codes: 0 after
SIGTERM, Ctrl-C or SIGHUP (the terminal was closed), 1 when the start fails or the engine dies, 128 + signal when a
signal ends the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import uvloop

from ...managers.tokenizer_manager import TokenizerManager
from .. import log
from ..errors import TercetError
from ..machine.standard_files import open_standard_files
from ..server_args import ServerArgs
from .allowed_paths import check_folders
from .answer_settings import answer_settings
from .engine_core import EngineCore
from .http_listener import (
    HttpListener,
    adopt_uvicorn_logs,
    bind,
    bind_group,
    max_connections,
    warn_of_few_connections,
)
from .http_server import create_app, make_server
from .http_workers import HttpWorkers
from .processes import CHILD_MODULE
from .profiling import make_profile_dir
from .saved_streams import SavedStreams
from .stream_journal import StreamJournal
from .tls import tls_context
from .tracing import RequestTracer

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 30.0
"""How long running requests may continue after a signal. A second SIGTERM or SIGINT ends them at once."""
GRACE_AFTER_DEATH_S = 2.5
"""How long `/health` answers 503 after a child process has died, so that load balancers notice."""
_DRAIN_POLL_S = 0.02


def serve(server_args: ServerArgs, *, child_module: str = CHILD_MODULE) -> int:
    """Serves until a signal comes or the engine dies. Returns the process' exit code.

    `child_module`: the module that a child process runs; tests replace it.
    """
    open_standard_files()
    log.configure("http", server_args.log_level, server_args.log_format)
    adopt_uvicorn_logs(server_args.log_level)
    num_workers = server_args.tokenizer_worker_num
    try:
        check_folders(server_args)
        tls = tls_context(server_args)
        number = max_connections()
        tracer = RequestTracer.start(server_args) if num_workers == 1 else None
    except ValueError as error:
        logger.error("Cannot start: %s", error)
        return 1
    try:
        if num_workers == 1:
            listeners = [bind(server_args.host, server_args.port)]
        else:
            listeners = bind_group(server_args.host, server_args.port, num_workers)
    except OSError as error:
        hint = "; choose another --port, or 0 for any free port" if error.errno == errno.EADDRINUSE else ""
        reason = f"{error.strerror or error}{hint}"
        logger.error("Cannot listen on %s:%d: %s", server_args.host, server_args.port, reason)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_ServerRun(server_args, listeners, tls, tracer, child_module, number).run())
    if tracer is not None:
        tracer.close()
    return code


class _NotStarted(Exception):
    """The start has failed, which is logged, or a signal has ended it. `code`: the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _cannot_start(reason: Exception | str) -> _NotStarted:
    logger.error("Cannot start: %s", reason)
    return _NotStarted(1)


class _ServerRun:
    """One run of the server, from the first request to the exit code."""

    def __init__(
        self,
        server_args: ServerArgs,
        listeners: list[socket.socket],
        tls: ssl.SSLContext | None,
        tracer: RequestTracer | None,
        child_module: str,
        max_connections: int,
    ) -> None:
        self._server_args = server_args.with_seed()  # before the HTTP workers start, so that they know it, too
        self._listeners = listeners
        self._address: tuple[str, int] = listeners[0].getsockname()[:2]
        self._tls = tls
        self._tracer = tracer
        self._child_module = child_module
        self._max_connections = max_connections
        self._http: HttpListener | None = None
        self._workers: HttpWorkers | None = None
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # nohup ignores it
        for signum in (signal.SIGINT, signal.SIGTERM, *hang_up):
            loop.add_signal_handler(signum, self._on_signal, signum)
        http: HttpListener | HttpWorkers
        if len(self._listeners) == 1:
            http = self._http = HttpListener(self._listeners[0], self._tls, self._max_connections)
        else:
            try:
                http = self._workers = HttpWorkers(self._server_args, self._listeners, self._child_module)
            except OSError as error:
                return _cannot_start(error).code
        try:
            return await self._run_with_journal()
        except _NotStarted as end:
            return end.code
        finally:
            await http.stop()

    async def _run_with_journal(self) -> int:
        await self._check_profile_dir()
        journal = await self._open_journal()
        try:
            core = await self._start_engine()
            try:
                return await self._serve(core, journal)
            finally:
                await core.stop()
        finally:
            if journal is not None:
                journal.close()

    async def _check_profile_dir(self) -> None:
        folder = self._server_args.profile_dir
        if folder is not None:
            try:
                await asyncio.to_thread(make_profile_dir, Path(folder))
            except OSError as error:
                raise _cannot_start(
                    f"--profile-dir {folder} is no folder for new files: {error.strerror or error}"
                ) from None

    async def _open_journal(self) -> StreamJournal | None:
        """The streams of `--resume-file`. None: it is not set."""
        args = self._server_args
        if args.resume_file is None:
            return None
        is_shared = len(args.api_keys) > 1
        try:
            return await asyncio.to_thread(StreamJournal.open, Path(args.resume_file), is_shared=is_shared)
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise _cannot_start(f"--resume-file {args.resume_file}: {reason or error}") from None

    async def _start_engine(self) -> EngineCore:
        starting = asyncio.create_task(EngineCore.start(self._server_args, child_module=self._child_module))
        await self._wait_for_signal_or(starting)
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().stop()
            raise _NotStarted(128 + self._signals[0])
        try:
            return starting.result()
        except (ValueError, OSError, TercetError) as error:
            raise _cannot_start(error) from None

    async def _serve(self, core: EngineCore, journal: StreamJournal | None) -> int:
        """Serves until a signal comes, or until the engine or an HTTP worker fails. Returns the exit code."""
        saved = None if journal is None else await self._saved_streams(journal, core.tokenizer_manager)
        ends: list[asyncio.Future[Any]] = [core.died]
        if self._http is not None:
            self._http.app = create_app(make_server(core.tokenizer_manager, saved=saved), tracer=self._tracer)
        if self._workers is not None:
            await self._open_workers(self._workers, core)
            ends.append(self._workers.failed)
        warn_of_few_connections(self._max_connections)
        gc.collect()
        gc.freeze()  # later collections skip what lives as long as the server
        logger.info("Tercet is ready: %s (model %s)", self._url(), self._server_args.model_name)
        await self._wait_for_signal_or(*ends)
        if core.died.done():
            await self._wait_for_signal(GRACE_AFTER_DEATH_S)
            return 1
        if any(end.done() for end in ends):
            return 1
        if saved is not None:
            saved.streams.drain()
        await self._drain(core)
        return 0

    async def _saved_streams(self, journal: StreamJournal, manager: TokenizerManager) -> SavedStreams:
        args = manager.server_args
        try:
            settings = await asyncio.to_thread(answer_settings, args, manager.model_config, manager.facts)
        except OSError as error:  # a file of the model has become unreadable
            raise _cannot_start(error) from None
        saved = SavedStreams(journal, settings, args.resume_grace)
        saved.begin_grace()
        return saved

    async def _open_workers(self, workers: HttpWorkers, core: EngineCore) -> None:
        opening = asyncio.create_task(workers.open(core.tokenizer_manager))
        await self._wait_for_signal_or(opening, core.died)
        if not opening.done():
            opening.cancel()
            raise _NotStarted(128 + self._signals[0] if self._signals else 1)
        try:
            opening.result()
        except (ValueError, TercetError) as error:
            raise _cannot_start(error) from None

    async def _drain(self, core: EngineCore) -> None:
        """Refuses new requests and waits until the running ones have finished.

        Returns early after DRAIN_TIMEOUT_S, at a second signal, when the engine dies, and while generation is paused.
        """
        manager = core.tokenizer_manager
        manager.draining = True
        logger.info("Shutting down; waiting for %d requests", manager.num_unfinished)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while (
            not self._is_idle(manager) and len(self._signals) < 2 and not core.died.done() and not manager.pause.is_on
        ):
            if time.monotonic() > deadline:
                if manager.num_unfinished:
                    logger.warning("%d requests did not finish before the shutdown timeout", manager.num_unfinished)
                else:
                    logger.warning("An HTTP worker did not report before the shutdown timeout that it is done")
                break
            await asyncio.sleep(_DRAIN_POLL_S)

    def _is_idle(self, manager: TokenizerManager) -> bool:
        """Whether all requests have ended."""
        return not manager.num_unfinished and (self._workers is None or self._workers.is_idle())

    async def _wait_for_signal_or(self, *work: asyncio.Future[Any]) -> None:
        """Waits until some of the work is done or a signal has come."""
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait([*work, signalled], return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()

    async def _wait_for_signal(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signalled.wait(), timeout_s)

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGHUP and self._signals:
            return  # a shell repeats it, and systemd may send it right after SIGTERM: nobody is in a hurry
        self._signals.append(signum)
        self._signalled.set()

    def _url(self) -> str:
        host, port = self._address
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
