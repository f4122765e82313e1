"""The HTTP workers of `--tokenizer-worker-num`, in the process that has the engine, their parent.

Each worker is a process that listens on the server's port. It sends tokenised requests here and gets outputs back
(worker_relay.py), asks for what concerns the whole server (forwarded.py), and hears the news of the engine. A worker
that dies or hangs is started again: its connections break, and its requests end. Those of the other workers go on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import zmq
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.calls import Calls
from ...managers.tokenizer_manager import TokenizerManager
from ...managers.worker_relay import WorkerRelay
from ..errors import EngineDead, InvalidRequest, TercetError
from ..grammar_spec import CheckGrammarReq
from ..io_struct import AbortFinish, AbortReq, BrokenMessage, RetainReq
from ..ipc import AsyncReceiver, RunDir, Sender
from ..server_args import ServerArgs
from ..worker_messages import (
    AbortCall,
    AbortReply,
    EndpointCall,
    EngineNews,
    FromWorker,
    GrammarVerdict,
    SampleReq,
    ToWorker,
    WorkerAlive,
    WorkerDrained,
    WorkerServes,
)
from .admin import AbortAnswer, AbortBody, check_abort
from .forwarded import WHOLE_SERVER, ParentEndpoints
from .http_server import ENDPOINTS, make_server
from .processes import ChildProcess, stop_children
from .restarts import RestartBudget
from .routing import Endpoint, Server, json_response
from .watchdog import HangDetector, Verdict, report_hang

logger = logging.getLogger(__name__)

_NEWS_S = 0.1
"""Time between two looks for news of the engine that no output has told."""


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
        self._service: Service | None = None
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
        endpoints = ParentEndpoints(server, [_with_aborts(one, self) for one in ENDPOINTS if one.path in WHOLE_SERVER])
        self._service = Service(manager, server, endpoints)
        for worker in self._workers:
            worker.open(self._service, self.tell_news)
        self.tell_news()
        manager.on_stall.add(self.tell_news)
        self._watching = asyncio.create_task(self._watch())
        for worker in list(self._workers):  # one that dies from now on is started again
            either: set[asyncio.Future[Any]] = {worker.serves, worker.child.ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    def is_idle(self) -> bool:
        """Whether every worker has told that its requests have ended, after the news that the server shuts down.

        A worker that is still starting has none.
        """
        self.tell_news()
        return all(worker.has_drained or not worker.is_open for worker in self._workers)

    async def abort(self, name: str | None) -> bool:
        """Aborts the requests of this name in all workers; None: all requests. Returns whether there was one."""
        assert self._service is not None
        manager = self._service.manager
        had_any = name is None and manager.num_unfinished > 0
        if name is None:
            manager.abort_all()
        found = await asyncio.gather(*(worker.abort(name) for worker in self._workers))
        return had_any or any(found)

    async def stop(self) -> None:
        """Ends the workers. Responses under way have two seconds to end. A second call does nothing."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._service is not None:
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
        """Tells every worker what has changed. A failure comes after the last outputs, all else before the next."""
        news = self._service.news() if self._service is not None else None
        if news is None or news == self._news:
            return
        self._news = news
        for worker in self._workers:
            if worker.is_open:
                if news.failure is not None:
                    worker.flush()
                worker.sender.send(news)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_NEWS_S)
            self.tell_news()
            for worker in self._workers:
                verdict = worker.hang.look(worker.silent_s)
                if verdict is not None:
                    self._run(worker.on_hang(verdict))

    def _start(self, listener: socket.socket) -> Worker:
        run_dir = RunDir(self._run_dir.path, self._num_started)
        self._num_started += 1
        child = ChildProcess("http_worker", self._child_module, listener=listener).launch(self._server_args, run_dir)
        args = self._server_args
        hang = HangDetector(args.watchdog_timeout, args.soft_watchdog_timeout)
        worker = Worker(child, listener, self._context, run_dir, hang)
        child.ended.add_done_callback(functools.partial(self._on_end, worker))
        self._workers.append(worker)
        return worker

    def _on_end(self, worker: Worker, ended: asyncio.Future[str]) -> None:
        if self._is_stopping or self._service is None or self.failed.done():
            return
        num_lost = worker.close()
        self._workers.remove(worker)
        if not self._budget.take():
            limit = self._budget.limit
            message = ended.result() + (f"; --engine-restarts {limit} is used up" if limit else "")
            logger.error("An HTTP worker has failed: %s", message)
            self.failed.set_result(message)
            return
        logger.error(
            "An HTTP worker has failed: %s; starting another (%d of %d); %d samples of its clients have ended",
            ended.result(),
            self._budget.num_taken,
            self._budget.limit,
            num_lost,
        )
        self._run(self._replace(worker.listener))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, listener: socket.socket) -> None:
        try:
            worker = self._start(listener)
        except OSError as error:  # for example no memory, or too many open files
            self.failed.set_result(f"an HTTP worker could not be started: {error.strerror or error}")
            return
        try:
            await worker.child.ready
        except (ValueError, TercetError) as error:  # it ends, and `_on_end` decides
            logger.error("An HTTP worker could not start: %s", error)
            return
        assert self._service is not None
        worker.open(self._service, self.tell_news)
        worker.sender.send(self._service.news())


class Service:
    """What the workers are served with."""

    def __init__(self, manager: TokenizerManager, server: Server, endpoints: ParentEndpoints) -> None:
        self.manager = manager
        self.endpoints = endpoints
        self._started = server.started

    def news(self) -> EngineNews:
        manager, args = self.manager, self.manager.server_args
        return EngineNews(
            facts=manager.facts,
            model_path=args.model_path,
            load_format=args.load_format,
            dtype=args.dtype,
            weight_version=args.weight_version,
            stall=manager.stall,
            failure=None if manager.failure is None else manager.failure.message,
            draining=manager.draining,
            started=self._started,
        )


class Worker:
    """One process, and the links to it."""

    def __init__(
        self,
        child: ChildProcess,
        listener: socket.socket,
        context: zmq.Context[Any],
        run_dir: RunDir,
        hang: HangDetector,
    ) -> None:
        self.child = child
        self.hang = hang
        self.listener = listener
        self.serves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it takes requests."""
        self.has_drained = False
        self.sender: Sender[ToWorker] = Sender(context, run_dir.tokenizer)
        self._receiver: AsyncReceiver[FromWorker] = AsyncReceiver(
            context, run_dir.scheduler, FromWorker, self._on_message
        )
        self._receiver.start(asyncio.get_running_loop())
        self._stacks = run_dir.stacks("http_worker")
        self._heard: float | None = None
        """When its last sign of life came; None before the first."""
        self._calls = Calls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._service: Service | None = None
        self._relay: WorkerRelay | None = None
        self._tell_news: Callable[[], None] = _nothing

    @property
    def is_open(self) -> bool:
        return self._relay is not None

    @property
    def silent_s(self) -> float:
        """Seconds since its last sign of life."""
        return 0.0 if self._heard is None else time.monotonic() - self._heard

    async def on_hang(self, verdict: Verdict) -> None:
        """Its loop does not turn. Logs that, and kills it unless it has been heard of meanwhile."""
        silent_s = self.silent_s
        await report_hang(self.child, self._stacks, silent_s, verdict)
        if verdict is Verdict.END and self.silent_s >= silent_s:
            self.child.kill()

    def open(self, service: Service, tell_news: Callable[[], None]) -> None:
        """From now on its messages are served."""
        self._service = service
        self._tell_news = tell_news
        self._relay = WorkerRelay(service.manager, self._send_outputs)

    def flush(self) -> None:
        if self._relay is not None:
            self._relay.flush()

    async def abort(self, name: str | None) -> bool:
        """As `HttpWorkers.abort`, in this worker. False if it dies meanwhile."""
        if not self.is_open:
            return False
        try:
            reply = await self._calls.ask(self.sender, lambda number: AbortCall(number, name), AbortReply)
        except EngineDead:
            return False
        return reply.found

    def close(self) -> int:
        """Ends its samples, and drops all messages. Returns the number of samples."""
        self._receiver.close()
        self.sender.close()
        self._calls.fail(EngineDead("the HTTP worker has died"))
        for task in self._tasks:
            task.cancel()
        relay, self._relay = self._relay, None
        return 0 if relay is None else relay.close()

    def _send_outputs(self, outputs: ToWorker) -> None:
        assert self._service is not None
        has_failed = self._service.manager.failure is not None
        if not has_failed:
            self._tell_news()
        self.sender.send(outputs)
        if has_failed:  # the worker ends all samples when it hears of it
            self._tell_news()

    def _on_message(self, message: FromWorker | BrokenMessage) -> None:
        service, relay = self._service, self._relay
        assert service is not None and relay is not None, "a worker sends nothing before it has news of the engine"
        if isinstance(message, SampleReq):
            relay.generate(message)
        elif isinstance(message, AbortReq):
            relay.abort(message.rid or "")
        elif isinstance(message, RetainReq):
            service.manager.retain(message)
        elif isinstance(message, EndpointCall):
            self._run(self._answer(service, message))
        elif isinstance(message, CheckGrammarReq):
            self._run(self._check(service.manager, message))
        elif isinstance(message, AbortReply):
            self._calls.on_reply(message)
        elif isinstance(message, WorkerServes):
            self.serves.set_result(None)
        elif isinstance(message, WorkerAlive):
            self._heard = time.monotonic()
        elif isinstance(message, WorkerDrained):
            self.has_drained = True
        else:
            relay.fail(message.rids, message.reason)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, service: Service, call: EndpointCall) -> None:
        reply = await service.endpoints.answer(call)
        self._tell_news()  # before the client knows of the change, and asks another worker
        self.sender.send(reply)

    async def _check(self, manager: TokenizerManager, question: CheckGrammarReq) -> None:
        assert manager.grammars is not None
        reason: str | None = None
        failure: AbortFinish | None = None
        try:
            await manager.grammars.check(question.spec)
        except InvalidRequest as error:
            reason = error.message
        except TercetError as error:
            failure = AbortFinish.of(error)
        except Exception:
            # Without a verdict, the request would wait for ever.
            logger.exception("A grammar could not be checked")
            failure = AbortFinish.of(TercetError("the grammar could not be checked"))
        self.sender.send(GrammarVerdict(question.call_id, reason, failure))


def _with_aborts(endpoint: Endpoint, workers: HttpWorkers) -> Endpoint:
    """/abort_request asks all workers: they know the names of requests. All other endpoints are as they are."""
    if endpoint.path != "/abort_request":
        return endpoint

    async def abort_request(server: Server, request: Request, body: AbortBody) -> ASGIApp:
        check_abort(body)
        return json_response(AbortAnswer(await workers.abort(body.rid)))

    return dataclasses.replace(endpoint, handler=abort_request)


def _nothing() -> None:
    """There is no news yet."""
