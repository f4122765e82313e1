"""Starts the engine's child processes and watches over them; the one file that starts processes.

A child is a fresh interpreter (`python -m tercet.srt.entrypoints.child ROLE`): nothing is pickled, nothing is forked,
so an engine starts as well from a notebook or from a script without a `__main__` guard.

The parent alone decides what a signal means, and ends its children in order. So each child runs in a session of its
own, which Ctrl-C does not reach, and ignores SIGTERM, which systemd sends to every process of a service. The parent
asks a child to stop down its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Literal

from ..env import child_environment
from ..errors import EngineDead
from ..io_struct import DetokenizerReady, SchedulerReady, StartFailed
from ..ipc import RunDir
from ..machine.cores import usable_cores
from ..server_args import ServerArgs
from .handshake import STOP, LaunchSpec, ReportReader, write_frame

Role = Literal["scheduler", "detokenizer"]

CHILD_MODULE = "tercet.srt.entrypoints.child"
_STOP_TIMEOUT_S = 5.0
_REAP_INTERVAL_S = 0.005
_REAP_TIMEOUT_S = 2.0


class ChildProcess:
    """A running child, as its parent's event loop sees it.

    `ready`: what it reports once it is up. Fails with ValueError where the user has to change something, with
    EngineDead where the child broke or died. `ended`: done once the process is gone, with how it went, in words.
    """

    def __init__(self, role: Role, server_args: ServerArgs, run_dir: RunDir, module: str = CHILD_MODULE) -> None:
        loop = asyncio.get_running_loop()
        self.role = role
        self.ready: asyncio.Future[SchedulerReady | DetokenizerReady] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._loop = loop
        self._reports = ReportReader()
        self._reaping: asyncio.Task[None] | None = None
        self._ready_fd, child_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, role],
                stdin=subprocess.PIPE,
                env=_environment(role),
                pass_fds=[child_fd],
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self._ready_fd)
            raise
        finally:
            os.close(child_fd)
        self.pid = self._process.pid
        loop.add_reader(self._ready_fd, self._on_readable)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which the other pipe is about to tell
            write_frame(self._process.stdin.fileno(), LaunchSpec(server_args, str(run_dir.path), child_fd))

    def ask_to_stop(self) -> None:
        """It ends at once while it starts, after the step that is running when it works."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(STOP)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def _on_readable(self) -> None:
        data = os.read(self._ready_fd, 1 << 16)
        if not data:
            self._loop.remove_reader(self._ready_fd)
            os.close(self._ready_fd)
            self._reaping = self._loop.create_task(self._reap())
            return
        report = self._reports.feed(data)
        if report is None or self.ready.done():
            return
        if isinstance(report, StartFailed):
            error = ValueError(report.message) if report.user_error else EngineDead(report.message)
            self._fail_ready(error)
        else:
            self.ready.set_result(report)

    async def _reap(self) -> None:
        """Takes the exit status. The pipe closes a moment before the process can be waited for."""
        waited_s = 0.0
        while self._process.poll() is None:
            if waited_s >= _REAP_TIMEOUT_S:
                self._process.kill()  # a process that closed its pipe but lives on is of no use
            await asyncio.sleep(_REAP_INTERVAL_S)
            waited_s += _REAP_INTERVAL_S
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not self.ready.done():
            self._fail_ready(EngineDead(f"the {self.role} process died while it started ({how})"))
        self.ended.set_result(f"the {self.role} process died ({how})")

    def _fail_ready(self, error: Exception) -> None:
        self.ready.set_exception(error)
        self.ready.exception()  # seen: when both children fail, only one's failure is awaited


async def stop_children(children: Iterable[ChildProcess]) -> None:
    """Asks them to stop; after five seconds SIGKILL. None of them runs or is a zombie afterwards."""
    ends = [child.ended for child in children]
    if not ends:
        return
    for child in children:
        child.ask_to_stop()
    _, alive = await asyncio.wait(ends, timeout=_STOP_TIMEOUT_S)
    if alive:
        for child in children:
            child.kill()
        await asyncio.wait(alive)


def _environment(role: Role) -> dict[str, str]:
    environment = child_environment(usable_cores() if role == "scheduler" else 1)
    # The child finds the package, and everything else, where this process found it.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return environment
