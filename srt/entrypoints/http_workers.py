"""The HTTP workers of `--tokenizer-worker-num`, in the process that has the engine, their parent.

Each worker is a process that listens on the server's port. It sends tokenised requests here and gets outputs back
(worker_relay.py), forwards requests that concern the whole server (forwarded.py), and is told the state of the engine.
A worker that dies or hangs is started again: its connections break, and its requests end. Those of the other workers go
on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any

import zmq
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.tokenizer_manager import TokenizerManager
from ..errors import EngineDead, TercetError
from ..ipc import RunDir
from ..server_args import ServerArgs
from ..worker_messages import EngineNews, ParentAlive
from .admin import AbortAnswer, AbortBody, check_abort
from .endpoints import ENDPOINTS
from .forwarded import WHOLE_SERVER, ParentEndpoints
from .http_server import make_server
from .processes import ChildProcess, stop_children
from .restarts import RestartBudget, retry_pause_s, start_limit_s
from .routing import Endpoint, Server, json_response
from .watchdog import HangDetector
from .worker_link import ServedEngine, Worker

logger = logging.getLogger(__name__)

_NEWS_S = 0.1
"""Time between two checks for changes of the engine's state that came with no output."""
_ALIVE_S = 0.25
"""Least time between two heartbeats to each worker. They are sent at one of the checks above."""
_CHANGES = frozenset({"/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk"})
"""The next request of the client may need the change, and may go to any worker."""


class HttpWorkers:
    """Starts the workers, serves them, and starts those again that die. It belongs to one event loop."""

    def __init__(self, server_args: ServerArgs, listeners: list[socket.socket], child_module: str) -> None:
        """`listeners`: one for each worker. They stay open here, so that no connection is lost with a worker that has
        not accepted it."""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when a worker has died and is not started again. The result says how it died."""
        self._server_args = server_args
        self._listeners = listeners
        self._child_module = child_module
        self._context: zmq.Context[Any] = zmq.Context()
        self._run_dir = RunDir.create()
        self._budget = RestartBudget(server_args.engine_restarts, server_args.engine_restart_window)
        self._num_started = 0
        self._num_failed_starts = 0
        """Since the last worker that was ready."""
        self._slowest_start_s = 0.0
        self._engine: ServedEngine | None = None
        self._news: EngineNews | None = None
        self._watching: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        """Starts of workers, and reports about those that hang."""
        self._workers: list[Worker] = []
        for listener in listeners:
            self._start(listener)

    async def open(self, manager: TokenizerManager) -> None:
        """Lets the workers serve this engine. Returns when all of them take requests. Raises ValueError, EngineDead."""
        await asyncio.gather(*(worker.child.ready for worker in self._workers))
        for worker in self._workers:
            if worker.child.ended.done():
                raise EngineDead(worker.child.ended.result())
        server = make_server(manager)
        endpoints = ParentEndpoints(server, [_with_workers(one, self) for one in ENDPOINTS if one.path in WHOLE_SERVER])
        self._engine = ServedEngine(manager, server, endpoints)
        for worker in self._workers:
            worker.open(self._engine, self.tell_news)
        self.tell_news()
        manager.on_stall.add(self.tell_news)
        self._watching = asyncio.create_task(self._watch())
        for worker in list(self._workers):  # one that dies from now on is started again
            either: set[asyncio.Future[Any]] = {worker.serves, worker.child.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    def is_idle(self) -> bool:
        """Whether every worker has reported that its requests have ended, after it was told that the server shuts down.

        A worker that is still starting has none.
        """
        self.tell_news()
        return all(worker.has_drained or not worker.is_open for worker in self._workers)

    async def abort(self, name: str | None) -> bool:
        """Aborts the requests of this name in all workers; None: all requests. Returns whether there was one.

        Raises EngineDead if none was found, and a worker does not answer.
        """
        assert self._engine is not None
        manager = self._engine.manager
        had_any = name is None and manager.num_unfinished > 0
        if name is None:
            manager.abort_all()
        found = await asyncio.gather(*(worker.abort(name) for worker in self._workers))
        if had_any or any(found):
            return True
        if None in found:
            raise EngineDead("an HTTP worker does not answer; it will abort such a request when it runs again")
        return False

    async def spread_news(self) -> None:
        """Returns when every worker that answers knows the state of the engine."""
        self.tell_news()
        await asyncio.gather(*(worker.catch_up() for worker in self._workers))

    async def stop(self) -> None:
        """Ends the workers. Responses under way have two seconds to end. A second call does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._engine is not None:
            self.tell_news()
            for worker in self._workers:
                worker.flush()
        if self._watching is not None:
            self._watching.cancel()
        await stop_children([worker.child for worker in self._workers])
        for worker in self._workers:
            worker.close()
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._context.destroy(linger=0)
        self._run_dir.remove()

    def tell_news(self) -> None:
        """Tells every worker what has changed. A failure is sent after the last outputs, everything else before the
        next ones."""
        news = self._engine.news() if self._engine is not None else None
        if news is None or news == self._news:
            return
        self._news = news
        for worker in self._workers:
            if worker.is_open:
                if news.failure is not None:
                    worker.flush()
                worker.sender.send(news)

    async def _watch(self) -> None:
        next_sign = 0.0
        while True:
            await asyncio.sleep(_NEWS_S)
            self.tell_news()
            if is_time := time.monotonic() >= next_sign:
                next_sign = time.monotonic() + _ALIVE_S
            for worker in self._workers:
                if is_time and worker.is_open:
                    worker.sender.send(ParentAlive())
                verdict = worker.hang.look(worker.silent_s)
                if verdict is not None:
                    self._run(worker.on_hang(verdict))

    def _start(self, listener: socket.socket) -> Worker:
        """Raises OSError."""
        self._run_dir = self._run_dir.renewed()
        run_dir = RunDir(self._run_dir.path, self._num_started, self._run_dir.work_dir)
        self._num_started += 1
        args = self._server_args
        child = ChildProcess.start("http_worker", self._child_module, listener=listener).launch(args, run_dir)
        hang = HangDetector(args.watchdog_timeout, args.soft_watchdog_timeout)
        try:
            worker = Worker(child, listener, self._context, run_dir, hang)
        except OSError:
            child.kill()
            raise
        child.ended.add_done_callback(functools.partial(self._on_end, worker))
        child.ready.add_done_callback(functools.partial(self._on_start_ended, time.monotonic()))
        self._workers.append(worker)
        return worker

    def _on_start_ended(self, began: float, ready: asyncio.Future[Any]) -> None:
        if ready.exception() is not None:
            self._num_failed_starts += 1
            return
        self._num_failed_starts = 0
        self._slowest_start_s = max(self._slowest_start_s, time.monotonic() - began)

    def _on_end(self, worker: Worker, ended: asyncio.Future[str]) -> None:
        if self._is_stopping or self._engine is None or self.failed.done():
            return
        num_lost = worker.close()
        self._workers.remove(worker)
        self._start_another(worker.listener, ended.result(), num_lost)

    def _start_another(self, listener: socket.socket, failure: str, num_lost: int) -> None:
        """After a failure, in which `num_lost` samples have ended. It is the server's failure if no restart is left."""
        if not self._budget.take():
            limit = self._budget.limit
            message = failure + (f"; --engine-restarts {limit} is used up" if limit else "")
            logger.error("An HTTP worker has failed: %s", message)
            self.failed.set_result(message)
            return
        pause_s = retry_pause_s(self._num_failed_starts)
        logger.error(
            "An HTTP worker has failed: %s; starting another%s (%d of %d); %d samples of its clients have ended",
            failure,
            f" in {pause_s:g} s" if pause_s else "",
            self._budget.num_taken,
            self._budget.limit,
            num_lost,
        )
        self._run(self._replace(listener, pause_s))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, listener: socket.socket, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        if self._is_stopping or self.failed.done():
            return
        try:
            worker = self._start(listener)
        except OSError as error:  # for example no memory, or too many open files
            self._num_failed_starts += 1
            self._start_another(listener, f"it could not be started: {error.strerror or error}", 0)
            return
        limit_s = start_limit_s(self._server_args.watchdog_timeout, self._slowest_start_s)
        ready, _ = await asyncio.wait([worker.child.ready], timeout=limit_s)
        if not ready:
            logger.error("An HTTP worker was not ready within %.0f s; killing it", limit_s)
            worker.child.kill()  # `_on_end` starts another
            return
        try:
            worker.child.ready.result()
        except (ValueError, TercetError) as error:  # it ends, and `_on_end` decides
            logger.error("An HTTP worker could not start: %s", error)
            return
        if worker.child.ended.done():
            return  # it died at once, and `_on_end` has started another
        assert self._engine is not None
        worker.open(self._engine, self.tell_news)
        self.tell_news()  # so that all workers know the same, and hear of the next change
        assert self._news is not None
        worker.sender.send(self._news)


def _with_workers(endpoint: Endpoint, workers: HttpWorkers) -> Endpoint:
    """/abort_request asks all workers, which know the names of requests. Changes are answered when all know of them."""

    async def abort_request(server: Server, request: Request, body: AbortBody) -> ASGIApp:
        check_abort(body)
        return json_response(AbortAnswer(await workers.abort(body.rid)))

    async def change(server: Server, request: Request, body: Any) -> ASGIApp:
        response = await endpoint.handler(server, request, body)
        await workers.spread_news()
        return response

    if endpoint.path == "/abort_request":
        return dataclasses.replace(endpoint, handler=abort_request)
    return dataclasses.replace(endpoint, handler=change) if endpoint.path in _CHANGES else endpoint
