"""One HTTP worker of `--tokenizer-worker-num` as its parent has it: the process, the links to it, and its messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import zmq

from ...managers.calls import Calls
from ...managers.tokenizer_manager import TokenizerManager
from ...managers.worker_relay import WorkerRelay
from ..errors import EngineDead, InvalidRequest, TercetError
from ..grammar_spec import CheckGrammarReq
from ..io_struct import AbortFinish, AbortReq, BrokenMessage, RetainReq
from ..ipc import AsyncReceiver, RunDir, Sender
from ..worker_messages import (
    AbortCall,
    AbortReply,
    CatchUpCall,
    CaughtUp,
    EndpointCall,
    EngineNews,
    FromWorker,
    GrammarVerdict,
    LimitCall,
    LimitRelease,
    SampleReq,
    ToWorker,
    WorkerAlive,
    WorkerDrained,
    WorkerServes,
)
from .forwarded import ParentEndpoints
from .key_limits import KeyLimits
from .processes import ChildProcess
from .routing import Server
from .watchdog import HangDetector, Verdict, report_hang
from .worker_limits import CountedRequests

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
"""How long a worker may take to answer whether it has a request, or that it knows the news."""


class ServedEngine:
    """The engine that the workers serve."""

    def __init__(self, manager: TokenizerManager, server: Server, endpoints: ParentEndpoints) -> None:
        self.manager = manager
        self.endpoints = endpoints
        self.limits = KeyLimits.of(manager.server_args, time.monotonic)
        self._started = server.started

    def news(self) -> EngineNews:
        manager, args = self.manager, self.manager.server_args
        return EngineNews(
            facts=msgspec.structs.replace(manager.facts, adapters=manager.adapters.usable),
            model_path=args.model_path,
            load_format=args.load_format,
            dtype=args.dtype,
            weight_version=args.weight_version,
            stall=manager.stall,
            failure=manager.failure,
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
        """When its last heartbeat came. The first one is that it is ready; None before."""
        self._calls = Calls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine: ServedEngine | None = None
        self._relay: WorkerRelay | None = None
        self._counted: CountedRequests | None = None
        """None without limits of clients."""
        self._tell_news: Callable[[], None] = _nothing

    @property
    def is_open(self) -> bool:
        return self._relay is not None

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat; 0 while it starts, which has a limit of its own (`HttpWorkers`)."""
        return 0.0 if self._heard is None else time.monotonic() - self._heard

    async def on_hang(self, verdict: Verdict) -> None:
        """Its loop hangs. Logs that, and kills it unless it has sent a heartbeat meanwhile."""
        silent_s = self.silent_s
        await report_hang(self.child, self._stacks, silent_s, verdict)
        if verdict is Verdict.END and self.silent_s >= silent_s:
            self.child.kill()

    def open(self, engine: ServedEngine, tell_news: Callable[[], None]) -> None:
        """From now on its messages are served."""
        self._heard = time.monotonic()
        self._engine = engine
        self._tell_news = tell_news
        self._relay = WorkerRelay(engine.manager, self._send_outputs)
        self._counted = None if engine.limits is None else CountedRequests(engine.limits)

    def flush(self) -> None:
        if self._relay is not None:
            self._relay.flush()

    async def abort(self, name: str | None) -> bool | None:
        """As `HttpWorkers.abort`, in this worker. False if it dies meanwhile, None if it does not answer."""
        if not self.is_open:
            return False
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reply = await self._calls.ask(self.sender, lambda number: AbortCall(number, name), AbortReply)
        except TimeoutError:
            return None
        except EngineDead:
            return False
        return reply.found

    async def catch_up(self) -> None:
        """Returns when the worker knows all news. Does not wait for one that dies or does not answer."""
        if self.is_open:
            with contextlib.suppress(TimeoutError, EngineDead):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._calls.ask(self.sender, CatchUpCall, CaughtUp)

    def close(self) -> int:
        """Ends its samples, and drops all messages. Returns the number of samples."""
        self._receiver.close()
        self.sender.close()
        self._calls.fail(EngineDead("the HTTP worker has died"))
        for task in self._tasks:
            task.cancel()
        if self._counted is not None:
            self._counted.release_all()
        relay, self._relay = self._relay, None
        return 0 if relay is None else relay.close()

    def _send_outputs(self, outputs: ToWorker) -> None:
        assert self._engine is not None
        has_failed = self._engine.manager.failure is not None
        if not has_failed:
            self._tell_news()
        self.sender.send(outputs)
        if has_failed:  # the worker ends all samples when it hears of it
            self._tell_news()

    def _on_message(self, message: FromWorker | BrokenMessage) -> None:
        engine, relay = self._engine, self._relay
        assert engine is not None and relay is not None, "a worker sends nothing before it has news of the engine"
        if isinstance(message, SampleReq):
            relay.generate(message)
        elif isinstance(message, AbortReq):
            relay.abort(message.rid or "")
        elif isinstance(message, RetainReq):
            engine.manager.retain(message)
        elif isinstance(message, EndpointCall):
            self._run(self._answer(engine, message))
        elif isinstance(message, CheckGrammarReq):
            self._run(self._check(engine.manager, message))
        elif isinstance(message, LimitCall):
            assert self._counted is not None, "workers have the same settings"
            self.sender.send(self._counted.take(message))
        elif isinstance(message, LimitRelease):
            assert self._counted is not None, "workers have the same settings"
            self._counted.release(message.call_id)
        elif isinstance(message, AbortReply | CaughtUp):
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

    async def _answer(self, engine: ServedEngine, call: EndpointCall) -> None:
        reply = await engine.endpoints.answer(call)
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
            # Without a verdict, the request would wait forever.
            logger.exception("A grammar could not be checked")
            failure = AbortFinish.of(TercetError("the grammar could not be checked"))
        self.sender.send(GrammarVerdict(question.call_id, reason, failure))


def _nothing() -> None:
    """There is no news yet."""
