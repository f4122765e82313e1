"""One life of an engine: the two child processes and the sockets to them, from a start to the next death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ..io_struct import BrokenMessage, ToScheduler, ToTokenizer
from ..ipc import AsyncReceiver, RunDir, Sender
from ..server_args import ServerArgs
from ..start_reports import SchedulerReady
from .processes import ChildProcess, stop_children


class EngineLife:
    """The processes and sockets of one life. Both processes are ready."""

    def __init__(
        self,
        children: Sequence[ChildProcess],
        facts: SchedulerReady,
        run_dir: RunDir,
        context: zmq.Context[Any],
    ) -> None:
        self.children = children
        self.facts = facts
        self.run_dir = run_dir
        self.sender: Sender[ToScheduler] = Sender(context, run_dir.scheduler)
        self._context = context
        self._receiver: AsyncReceiver[ToTokenizer] | None = None

    @classmethod
    async def start(
        cls,
        server_args: ServerArgs,
        run_dir: RunDir,
        context: zmq.Context[Any],
        child_module: str,
        *,
        meanwhile: asyncio.Future[Any] | None = None,
        spare: ChildProcess | None = None,
    ) -> EngineLife:
        """Starts the processes and waits until they and `meanwhile` are ready. Leaves none behind when that fails or is
        cancelled. `spare`: a process that becomes the scheduler if it is alive.

        Raises ValueError for a mistake of the user, EngineDead when a process fails, DiedAtStart when one dies without
        saying why.
        """
        children: list[ChildProcess] = []
        try:
            if spare is not None and not spare.ended.done():
                children.append(spare)
            else:
                children.append(ChildProcess("scheduler", child_module))
            children.append(ChildProcess("detokenizer", child_module))
            for child in children:
                child.launch(server_args, run_dir)
            others = [children[1].ready] if meanwhile is None else [children[1].ready, meanwhile]
            facts, *_ = await asyncio.gather(children[0].ready, *others)
            assert isinstance(facts, SchedulerReady)
            return cls(children, facts, run_dir, context)
        except BaseException:
            await stop_children(children)
            raise

    def listen(self, on_message: Callable[[ToTokenizer | BrokenMessage], None]) -> None:
        """Passes every message of this life on."""
        self._receiver = AsyncReceiver(self._context, self.run_dir.tokenizer, ToTokenizer, on_message)
        self._receiver.start(asyncio.get_running_loop())

    def disconnect(self) -> None:
        """Drops all messages that are under way."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self.sender.close()

    async def kill(self) -> None:
        """Kills the processes and waits for their ends."""
        for child in self.children:
            child.kill()
        await asyncio.wait([child.ended for child in self.children])
