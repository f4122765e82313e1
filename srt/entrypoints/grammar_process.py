"""The engine's grammar worker: started for the first grammar, killed when it takes too long, and started again.

It compiles one grammar at a time, so a grammar at the limit makes other new grammars wait for that long, but no request
that has none, and none whose grammar is known already.

A grammar is refused for its processor time, which does not depend on what else the machine does. If a worker gets no
processor time, or another process kills it, nothing is known about its grammar.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from typing import Any

import zmq

from ..errors import EngineDead, GrammarNotChecked
from ..grammar_spec import CheckGrammarReply, CheckGrammarReq, GrammarSpec
from ..io_struct import BrokenMessage
from ..ipc import AsyncReceiver, RunDir, Sender
from ..machine.processor_time import processor_time_s
from ..server_args import ServerArgs
from .processes import CHILD_MODULE, ChildProcess, stop_children

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""Most processor time of one compilation."""
WAIT_S = 20.0
"""Most time of one compilation. The worker has a low priority, so a busy machine gives it little processor time."""
START_S = 60.0
"""Most time of a worker's start."""
_MIN_WAIT_S = 0.01
"""About the resolution of a process's processor time."""


class _NoVerdict(Exception):
    """The worker has ended, and the grammar need not be the cause."""


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
        wait_s: float = WAIT_S,
        start_s: float = START_S,
    ) -> None:
        self._server_args = server_args
        self._run_dir = run_dir
        self._context = context
        self._child_module = child_module
        self.timeout_s = timeout_s
        self.wait_s = wait_s
        self.start_s = start_s
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
        """Why the grammar cannot be used; None if it can. Must be called for one grammar at a time.

        Raises EngineDead after `stop` and if the worker's settings are refused, GrammarNotChecked if two attempts give
        no result.
        """
        try:
            return await self._attempt(spec)
        except _NoVerdict as error:
            logger.warning("A grammar (%s) could not be checked: its worker %s; trying again", spec.kind, error)
        try:
            return await self._attempt(spec)
        except _NoVerdict as error:
            raise GrammarNotChecked(
                f"{spec.kind} could not be checked: two grammar workers gave no result, and the last one {error}"
            ) from None

    async def _attempt(self, spec: GrammarSpec) -> str | None:
        """As `compile`. Raises _NoVerdict."""
        child, sender = await self._start()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._answer = next(self._call_ids), answer
        sender.send(CheckGrammarReq(self._answer[0], spec))
        used_s = await self._wait(child, answer)
        self._answer = None
        if answer.done():
            return answer.result()
        has_died = child.ended.done()
        await self._end(child)
        if has_died and (self._is_stopped or child.returncode == -signal.SIGKILL):
            raise _NoVerdict("was killed")  # neither a library nor its limits send SIGKILL
        if not has_died and used_s < self.timeout_s:
            raise _NoVerdict(f"got only {used_s:.1f} s of processor time in {self.wait_s:g} s")
        limit = f"took more than {self.timeout_s:g} s of processor time"
        why = "took too much memory or crashed the compiler" if has_died else limit
        logger.warning("The compilation of a grammar (%s) %s; its worker has ended", spec.kind, why)
        return f"{spec.kind} cannot be used: its compilation {why}"

    async def _wait(self, child: ChildProcess, answer: asyncio.Future[str | None]) -> float:
        """Returns with the answer, at the end of the process, or at a limit: the processor time used, in seconds."""
        clock = asyncio.get_running_loop().time
        either: set[asyncio.Future[Any]] = {answer, child.ended}
        until, used_before_s, used_s = clock() + self.wait_s, processor_time_s(child.pid), 0.0
        while (left_s := min(self.timeout_s - used_s, until - clock())) > 0:
            timeout_s = max(left_s, _MIN_WAIT_S)
            done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
            used_s = processor_time_s(child.pid) - used_before_s
        return used_s

    async def stop(self) -> None:
        """Ends the worker. Later calls of `compile` fail."""
        self._is_stopped = True
        if self._child is not None:
            await stop_children([self._child])
        self._forget_worker()
        self._close_receiver()
        self._run_dir.remove()

    async def _start(self) -> tuple[ChildProcess, Sender[CheckGrammarReq]]:
        if self._child is not None and self._child.ended.done():
            self._forget_worker()
        if self._is_stopped:
            raise EngineDead("the engine was shut down")
        try:
            if self._child is None:
                self._listen()
                self._child = ChildProcess.start("grammar", self._child_module).launch(self._server_args, self._run_dir)
        except OSError as error:  # for example no memory, or too many open files
            raise _NoVerdict(f"could not be started: {error.strerror or error}") from None
        child = self._child
        try:
            await asyncio.wait_for(asyncio.shield(child.ready), self.start_s)
        except TimeoutError:
            await self._end(child)
            raise _NoVerdict(f"did not start within {self.start_s:g} s") from None
        except EngineDead as error:  # somebody has killed it, or memory was short
            await self._end(child)
            raise _NoVerdict(f"did not start: {error}") from None
        except ValueError as error:
            raise EngineDead(f"the grammar worker could not start: {error}") from None
        if self._sender is None:
            self._sender = Sender(self._context, self._run_dir.grammar)
        return child, self._sender

    def _listen(self) -> None:
        """Makes the socket for replies, again if somebody has removed its directory. Raises OSError."""
        run_dir = self._run_dir.renewed()
        if run_dir is not self._run_dir:
            self._run_dir = run_dir
            self._close_receiver()
        if self._receiver is None:
            self._receiver = AsyncReceiver(
                self._context, self._run_dir.grammar_replies, CheckGrammarReply, self._on_message
            )
            self._receiver.start(asyncio.get_running_loop())

    def _close_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _on_message(self, message: CheckGrammarReply | BrokenMessage) -> None:
        if self._answer is None or not isinstance(message, CheckGrammarReply):
            return
        call_id, answer = self._answer
        if message.call_id == call_id and not answer.done():
            answer.set_result(message.reason)

    async def _end(self, child: ChildProcess) -> None:
        child.kill()
        await child.ended
        self._forget_worker()

    def _forget_worker(self) -> None:
        """The next worker gets a socket of its own, so that no request of this one reaches it."""
        self._child = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
