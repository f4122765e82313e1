"""Starts and watches the engine's child processes. No other file starts processes.

A child is a new interpreter (`python -m tercet.srt.entrypoints.child ROLE`). Nothing is pickled or forked, so an engine
also starts from a notebook and from a script without a `__main__` guard.

Only the parent handles signals, and it stops its children in an orderly way. So each child runs in its own session,
which Ctrl-C does not reach, and ignores SIGTERM, which systemd sends to every process of a service. The parent asks a
child to stop by a byte on its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Literal

from ..env import child_environment
from ..errors import EngineDead
from ..ipc import RunDir
from ..machine.cores import usable_cores
from ..server_args import ServerArgs
from ..start_reports import Ready, StartFailed
from .handshake import STOP, LaunchSpec, ReportReader, write_frame

Role = Literal["scheduler", "detokenizer", "grammar", "http_worker"]

CHILD_MODULE = "tercet.srt.entrypoints.child"
_STOP_TIMEOUT_S = 5.0
_REAP_INTERVAL_S = 0.005
_REAP_TIMEOUT_S = 2.0


class DiedAtStart(EngineDead):
    """A process died before it was ready, and did not say why."""


class ChildProcess:
    """A child process, watched from the parent's event loop. Until `launch` it is a spare: it only loads its modules.

    `ready`: a future of the child's report that it is ready. It fails with ValueError for a mistake of the user, with
    EngineDead when the child failed, and with DiedAtStart when it died. `ended`: a future that is done when the process
    is gone. Its result says how the process ended.
    """

    def __init__(self, role: Role, module: str = CHILD_MODULE, listener: socket.socket | None = None) -> None:
        """`listener`: a socket that the child inherits."""
        loop = asyncio.get_running_loop()
        self.role = role
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._loop = loop
        self._reports = ReportReader()
        self._reaping: asyncio.Task[None] | None = None
        self._is_launched = False
        self._ready_fd, child_fd = os.pipe()
        self._report_fd = child_fd
        """The number of the pipe's other end in the child."""
        self._listener_fd = None if listener is None else listener.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, role],
                stdin=subprocess.PIPE,
                env=_environment(role),
                pass_fds=[child_fd] if listener is None else [child_fd, listener.fileno()],
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

    def launch(self, server_args: ServerArgs, run_dir: RunDir) -> ChildProcess:
        """Tells the process what to do. Must be called once."""
        assert self._process.stdin is not None and not self._is_launched
        self._is_launched = True
        with contextlib.suppress(BrokenPipeError):  # the child is dead already; the ready pipe will report that
            spec = LaunchSpec(server_args, str(run_dir.path), run_dir.life, self._report_fd, self._listener_fd)
            write_frame(self._process.stdin.fileno(), spec)
        return self

    def ask_to_stop(self) -> None:
        """Asks the child to stop. A starting child exits at once, a running one after its current step."""
        if not self._is_launched:
            self.kill()
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(STOP)

    @property
    def returncode(self) -> int:
        """As of subprocess, once the process has ended."""
        return int(self._process.returncode)

    def send_signal(self, signum: signal.Signals) -> None:
        """Does nothing if the process has ended."""
        self._process.send_signal(signum)

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
        """Waits for the exit status. The pipe closes a moment before the status is available."""
        waited_s = 0.0
        while self._process.poll() is None:
            if waited_s >= _REAP_TIMEOUT_S:
                self._process.kill()  # a child that closed its pipe but still runs is broken
            await asyncio.sleep(_REAP_INTERVAL_S)
            waited_s += _REAP_INTERVAL_S
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not self.ready.done():
            self._fail_ready(DiedAtStart(f"the {self.role} process died while it started ({how})"))
        self.ended.set_result(f"the {self.role} process died ({how})")

    def _fail_ready(self, error: Exception) -> None:
        self.ready.set_exception(error)
        self.ready.exception()  # marks it as retrieved: when both children fail, only one future is awaited


async def stop_children(children: Iterable[ChildProcess]) -> None:
    """Asks the children to stop, and kills those that still run after five seconds. Waits until all have ended."""
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
    # The child searches for modules in the same places as this process.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return environment
