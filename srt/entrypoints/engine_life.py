"""One life of an engine: the two child processes and the sockets to them, from a start to the next death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from ..io_struct import BrokenMessage, ToScheduler, ToTokenizer
from ..ipc import AsyncReceiver, RunDir, Sender
from ..server_args import ServerArgs
from ..start_reports import Loaded, SchedulerReady
from .processes import ChildProcess, Report, Role, stop_children

ROLES: tuple[Role, ...] = ("scheduler", "detokenizer")
"""The processes of a life."""


class _Started(NamedTuple):
    """A process that is ready."""

    process: ChildProcess
    report: Report
    fork_server: ChildProcess | None
    """The process that has forked it."""


async def _start(
    process: ChildProcess, server_args: ServerArgs, run_dir: RunDir, started: list[ChildProcess]
) -> _Started:
    """Launches a process unless it is a fork server, waits for it, and has a fork server fork the one that will run.

    Adds the fork to `started`.
    """
    if process.launched_with is None:
        process.launch(server_args, run_dir)
    report = await process.ready
    if not isinstance(report, Loaded):
        return _Started(process, report, None)
    try:
        fork = await process.fork(server_args, run_dir)
    except OSError:
        process.kill()  # it may be stopped
        raise
    started.append(fork)
    return _Started(fork, await fork.ready, process)


class EngineLife:
    """The processes and sockets of one life. Both processes are ready."""

    def __init__(
        self,
        children: Sequence[ChildProcess],
        facts: SchedulerReady,
        run_dir: RunDir,
        context: zmq.Context[Any],
        fork_servers: Sequence[ChildProcess] = (),
    ) -> None:
        self.children = children
        self.fork_servers = fork_servers
        """Those that have forked the processes, and can fork them again."""
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
        spares: Mapping[Role, ChildProcess] | None = None,
    ) -> EngineLife:
        """Starts the processes and waits until they and `meanwhile` are ready. Leaves none behind when that fails or is
        cancelled. `spares`: processes that are used instead of new ones if they are alive. A fork server forks the one
        that will run.

        Raises ValueError for a mistake of the user, EngineDead when a process fails, DiedAtStart when one dies without
        saying why.
        """
        spares = spares or {}
        started = list(spares.values())
        starts: list[asyncio.Future[_Started]] = []
        try:
            for role in ROLES:
                process = spares.get(role)
                if process is None or process.ended.done():
                    process = ChildProcess.start(role, child_module, may_fork=server_args.engine_restarts > 0)
                    started.append(process)
                starts.append(asyncio.ensure_future(_start(process, server_args, run_dir, started)))
            scheduler, detokenizer, *_ = await asyncio.gather(*starts, *([] if meanwhile is None else [meanwhile]))
            assert isinstance(scheduler.report, SchedulerReady)
            fork_servers = [one.fork_server for one in (scheduler, detokenizer) if one.fork_server is not None]
            children = [scheduler.process, detokenizer.process]
            return cls(children, scheduler.report, run_dir, context, fork_servers)
        except BaseException:
            for start in starts:
                start.cancel()
            if starts:
                await asyncio.wait(starts)
            await stop_children(started)
            raise

    @property
    def processes(self) -> list[ChildProcess]:
        """All processes, those that only fork included."""
        return [*self.children, *self.fork_servers]

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
