"""An HTTP worker of `--tokenizer-worker-num`: accepts connections, reads bodies, tokenises, and writes answers.

Several of them listen on one port. The parent process has the engine; see http_workers.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import uvloop
import zmq

from ...managers.calls import Answer, Calls
from ...managers.generation import error_of
from ...managers.grammar_checker import GrammarChecker
from ...managers.worker_manager import WorkerManager
from ..errors import EngineDead, TercetError
from ..grammar_spec import CheckGrammarReq, GrammarSpec
from ..io_struct import BatchTextOut, BrokenMessage
from ..ipc import AsyncReceiver, RunDir, Sender
from ..model_files.load_config import load_model_config
from ..model_files.model_config import ModelConfig
from ..server_args import ServerArgs
from ..settings.failures import HEARTBEAT_S
from ..start_reports import HttpWorkerReady
from ..text.tokenizer import Tokenizer, tokenizer_of
from ..worker_messages import (
    AbortCall,
    AbortReply,
    CatchUpCall,
    CaughtUp,
    EndpointCall,
    EndpointReply,
    EngineNews,
    GrammarVerdict,
    LimitReply,
    ParentAlive,
    Recoveries,
    ToWorker,
    WorkerAlive,
    WorkerDrained,
    WorkerServes,
)
from .http_listener import HttpListener, adopt_uvicorn_logs, max_connections
from .http_server import create_app, make_server
from .tls import tls_context
from .tracing import RequestTracer
from .worker_limits import AskedLimits

R = TypeVar("R", bound=Answer)

_POLL_S = 0.02
_SILENT_S = 1.0
"""When the parent has been silent for longer, streams and probes say so."""
_NO_ANSWER = "the process that has the engine does not answer"


def run_http_worker(
    server_args: ServerArgs,
    run_dir: RunDir,
    on_ready: Callable[[HttpWorkerReady], None],
    should_stop: Callable[[], bool],
    listener: socket.socket,
) -> None:
    """The process of an HTTP worker, until `should_stop()` is true."""
    adopt_uvicorn_logs(server_args.log_level)
    tracer = RequestTracer.start(server_args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server_args, run_dir, on_ready, should_stop, listener, tracer))
    if tracer is not None:
        tracer.close()


async def _serve(
    server_args: ServerArgs,
    run_dir: RunDir,
    on_ready: Callable[[HttpWorkerReady], None],
    should_stop: Callable[[], bool],
    listener: socket.socket,
    tracer: RequestTracer | None,
) -> None:
    listener.setblocking(False)
    listen = functools.partial(HttpListener, listener, tls_context(server_args), max_connections())
    # The first workers answer at once, with 503. A worker that replaces one lets connections wait until it is ready.
    http = listen() if run_dir.life < server_args.tokenizer_worker_num else None
    config = load_model_config(server_args.model_path, server_args.load_format)
    tokenizer = await asyncio.to_thread(tokenizer_of, server_args)
    context: zmq.Context[Any] = zmq.Context()
    worker = HttpWorker(server_args, config, tokenizer, http, listen, context, run_dir, tracer)
    on_ready(HttpWorkerReady())
    while not should_stop():
        await asyncio.sleep(_POLL_S)
        worker.tell_alive()
        worker.look_at_parent()
        worker.tell_if_drained()
        if worker.error is not None:
            raise worker.error
    await worker.stop()
    context.destroy()


class HttpWorker:
    """The links of a worker to its parent, and its app, which starts when the worker has the first EngineNews."""

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        http: HttpListener | None,
        listen: Callable[[], HttpListener],
        context: zmq.Context[Any],
        run_dir: RunDir,
        tracer: RequestTracer | None,
    ) -> None:
        self._server_args = server_args
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._http = http
        self._listen = listen
        self._number = run_dir.life
        self._tracer = tracer
        self.error: Exception | None = None
        """Why it cannot take requests; None: it can, or has no news yet."""
        self._manager: WorkerManager | None = None
        ids = itertools.count(1)
        self._calls = Calls(ids)
        self._reads = Calls(ids)
        """Calls that do not wait for a silent parent: about limits, and of endpoints that change nothing."""
        self._heard = time.monotonic()
        """When the last message of the parent came."""
        self._num_silent_looks = 0
        self._has_drained = False
        self._next_sign = 0.0
        # It takes FromWorker, and of ToScheduler all but the Questions, which only forwarded endpoints ask.
        self._parent: Sender[Any] = Sender(context, run_dir.scheduler)
        self._receiver: AsyncReceiver[ToWorker] = AsyncReceiver(context, run_dir.tokenizer, ToWorker, self._on_message)
        self._receiver.start(asyncio.get_running_loop())

    def tell_alive(self) -> None:
        """Tells the parent twice a second that this process does not hang."""
        now = time.monotonic()
        if self._manager is not None and now >= self._next_sign:
            self._next_sign = now + HEARTBEAT_S
            self._parent.send(WorkerAlive())

    def look_at_parent(self) -> None:
        """Checks whether the parent is silent, because it is stopped or hangs.

        It counts as silent after two such checks in a row. If this process was stopped itself, it reads the parent's
        messages between the two checks.
        """
        if self._manager is None:
            return
        is_late = time.monotonic() - self._heard > _SILENT_S
        self._num_silent_looks = self._num_silent_looks + 1 if is_late else 0
        self._manager.set_parent_silent(self._is_parent_silent)
        if self._is_parent_silent:
            self._reads.fail(EngineDead(_NO_ANSWER))

    @property
    def _is_parent_silent(self) -> bool:
        return self._num_silent_looks > 1

    def tell_if_drained(self) -> None:
        """Tells the parent, once, that all requests have ended and no more are taken."""
        manager = self._manager
        if manager is not None and manager.draining and not manager.num_unfinished and not self._has_drained:
            self._has_drained = True
            self._parent.send(WorkerDrained())

    async def stop(self) -> None:
        """Ends the connections. Responses under way have two seconds to end."""
        if self._http is not None:
            await self._http.stop()
        self.close()

    def close(self) -> None:
        """Closes the links."""
        self._receiver.close()
        self._parent.close()

    async def forward(self, question: Callable[[int], EndpointCall], *, is_read: bool) -> EndpointReply:
        """The parent's answer to a request. See `Forward`."""
        if is_read:
            return await self._read(question, EndpointReply)
        return await self._calls.ask(self._parent, question, EndpointReply)

    async def _read(self, question: Callable[[int], Any], reply_type: type[R]) -> R:
        if self._is_parent_silent:
            raise EngineDead(_NO_ANSWER)
        return await self._reads.ask(self._parent, question, reply_type)

    async def compile(self, spec: GrammarSpec) -> str | None:
        """Why a grammar cannot be used; None if it can. The parent knows (see GrammarWorker)."""
        verdict = await self._calls.ask(self._parent, lambda number: CheckGrammarReq(number, spec), GrammarVerdict)
        error = error_of(verdict.failure)
        if error is not None:
            raise error
        return verdict.reason

    def _on_message(self, message: ToWorker | BrokenMessage) -> None:
        self._heard = time.monotonic()
        self._num_silent_looks = 0
        if isinstance(message, EndpointReply):
            self._reads.on_reply(message)
            self._calls.on_reply(message)
        elif isinstance(message, LimitReply):
            self._reads.on_reply(message)
        elif isinstance(message, GrammarVerdict):
            self._calls.on_reply(message)
        elif isinstance(message, ParentAlive):
            pass
        elif isinstance(message, EngineNews):
            self._hear(message)
        elif self._manager is None:
            raise TercetError("a message came before the first news of the engine")
        elif isinstance(message, AbortCall):
            self._parent.send(AbortReply(message.call_id, self._manager.abort_by_name(message.name)))
        elif isinstance(message, CatchUpCall):
            self._parent.send(CaughtUp(message.call_id))
        elif isinstance(message, Recoveries):
            self._manager.hear_of_recoveries(message.by_key)
        else:
            assert isinstance(message, BatchTextOut | BrokenMessage)
            self._manager.on_message(message)

    def _hear(self, news: EngineNews) -> None:
        if self._manager is not None:
            self._manager.hear(news)
            return
        try:
            self._begin(news)
        except Exception as error:
            self.error = error

    def _begin(self, news: EngineNews) -> None:
        """Takes requests from now on."""
        args = self._server_args
        self._manager = WorkerManager(
            args, self._model_config, self._tokenizer, news, self._parent, GrammarChecker(self), self._number
        )
        share = 1 / args.tokenizer_worker_num
        server = dataclasses.replace(make_server(self._manager), share=share, started=news.started)
        if server.key_limits is not None:
            limits = AskedLimits(self._read, self._parent.send, time.monotonic)
            server = dataclasses.replace(server, key_limits=limits)
        self._http = self._http or self._listen()
        self._http.app = create_app(server, tracer=self._tracer, forward=self.forward)
        self._parent.send(WorkerServes())
