"""The engine's grammar worker: started for the first grammar, killed when it takes too long, and started again.

It compiles one grammar at a time, so a grammar at the limit makes other new grammars wait for that long, but no request
that has none, and none whose grammar is known already.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from typing import Any

import zmq

from ..errors import EngineDead
from ..grammar_spec import CheckGrammarReply, CheckGrammarReq, GrammarSpec
from ..io_struct import BrokenMessage
from ..ipc import AsyncReceiver, RunDir, Sender
from ..server_args import ServerArgs
from .processes import CHILD_MODULE, ChildProcess, stop_children

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Most time of one compilation."""
_KILLED = "killed"
"""The worker was killed by SIGKILL, which neither a library nor its limits send."""


class GrammarProcess:
    """A GrammarWorker in a child process. It belongs to the event loop of the EngineCore."""

    def __init__(
        self,
        server_args: ServerArgs,
        run_dir: RunDir,
        context: zmq.Context[Any],
        *,
        child_module: str = CHILD_MODULE,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._server_args = server_args
        self._run_dir = run_dir
        self._context = context
        self._child_module = child_module
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._sender: Sender[CheckGrammarReq] | None = None
        self._receiver: AsyncReceiver[CheckGrammarReply] | None = None
        self._call_ids = itertools.count(1)
        self._answer: tuple[int, asyncio.Future[str | None]] | None = None
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        """The process id of the worker, if one runs."""
        return None if self._child is None else self._child.pid

    async def compile(self, spec: GrammarSpec) -> str | None:
        """Why the grammar cannot be used; None if it can. Raises EngineDead if no worker can be started."""
        async with self._turn:
            how = await self._attempt(spec)
            if how is _KILLED:  # by somebody else, so the grammar need not be the cause
                how = await self._attempt(spec)
        if how is _KILLED:
            return f"{spec.kind} cannot be used: its compilation was killed twice, as for too much memory"
        return how

    async def _attempt(self, spec: GrammarSpec) -> str | None:
        """As `compile`, or _KILLED."""
        child, sender = await self._start()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answer = next(self._call_ids), answer
        sender.send(CheckGrammarReq(self._answer[0], spec))
        either: set[asyncio.Future[Any]] = {answer, child.ended}
        await asyncio.wait(either, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self._answer = None
        if answer.done():
            return answer.result()
        is_slow = not child.ended.done()
        await self._end_worker()
        why = f"took more than {self._timeout_s:g} s" if is_slow else "took too much memory or crashed the compiler"
        logger.warning("The compilation of a grammar (%s) %s; its worker has ended", spec.kind, why)
        if not is_slow and child.returncode == -signal.SIGKILL:
            return _KILLED
        return f"{spec.kind} cannot be used: its compilation {why}"

    async def stop(self) -> None:
        """Ends the worker. Later calls of `compile` fail."""
        self._is_stopped = True
        if self._child is not None:
            await stop_children([self._child])
        self._forget_worker()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def _start(self) -> tuple[ChildProcess, Sender[CheckGrammarReq]]:
        if self._child is not None and self._child.ended.done():
            self._forget_worker()
        if self._is_stopped:
            raise EngineDead("the engine was shut down")
        if self._receiver is None:
            self._receiver = AsyncReceiver(
                self._context, self._run_dir.grammar_replies, CheckGrammarReply, self._on_message
            )
            self._receiver.start(asyncio.get_running_loop())
        if self._child is None:
            self._child = ChildProcess("grammar", self._child_module).launch(self._server_args, self._run_dir)
        child = self._child
        try:
            await asyncio.shield(child.ready)
        except ValueError as error:
            raise EngineDead(f"the grammar worker could not start: {error}") from None
        if self._sender is None:
            self._sender = Sender(self._context, self._run_dir.grammar)
        return child, self._sender

    def _on_message(self, message: CheckGrammarReply | BrokenMessage) -> None:
        if self._answer is None or not isinstance(message, CheckGrammarReply):
            return
        call_id, answer = self._answer
        if message.call_id == call_id and not answer.done():
            answer.set_result(message.reason)

    async def _end_worker(self) -> None:
        assert self._child is not None
        self._child.kill()
        await self._child.ended
        self._forget_worker()

    def _forget_worker(self) -> None:
        """The next worker gets a socket of its own, so that no request of this one reaches it."""
        self._child = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
