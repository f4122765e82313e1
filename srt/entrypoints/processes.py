"""Starts and watches the engine's child processes. Only this file and fork_server.py start processes.

A child is a new interpreter (`python -m tercet.srt.entrypoints.child PARENT ROLE`), or the fork of such a child
(fork_server.py). Nothing is pickled, and this process is not forked, so an engine also starts from a notebook and from
a script without a `__main__` guard.

Only the parent handles signals, and it stops its children in an orderly way. So each child runs in its own session,
which Ctrl-C does not reach, and ignores SIGTERM and SIGHUP, which systemd may send to every process of a service. The
parent asks a child to stop by a byte on its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, NamedTuple

from ..env import child_environment
from ..errors import EngineDead
from ..ipc import RunDir
from ..machine.cores import usable_cores
from ..server_args import ServerArgs
from ..start_reports import Loaded, Ready, StartFailed
from .forks import UNKNOWN_EXIT, ForkedProcess, ForkLink
from .handshake import STOP, LaunchSpec, ReportReader, write_spec

Role = Literal["scheduler", "detokenizer", "grammar", "http_worker"]
Report = Ready | Loaded

CHILD_MODULE = "tercet.srt.entrypoints.child"
_STOP_TIMEOUT_S = 5.0
_REAP_INTERVAL_S = 0.005
_REAP_TIMEOUT_S = 2.0


class DiedAtStart(EngineDead):
    """A process died before it was ready, and did not say why."""


class _Inherited(NamedTuple):
    """The file descriptors that a new interpreter has from this process."""

    report: int
    """The pipe for its report."""
    fork: int | None
    """The socket to a fork server; None: it must not become one."""
    listener: int | None
    """A listening socket; None: it needs none."""


class ChildProcess:
    """A child process, watched from the parent's event loop. It is a new interpreter (`start`) or a fork (`fork`).

    `ready`: a future of the child's report that it is ready. It fails with ValueError for a mistake of the user, with
    EngineDead when the child failed, and with DiedAtStart when it died. `ended`: a future that is done when the process
    is gone. Its result says how the process ended.
    """

    def __init__(
        self,
        role: Role,
        process: subprocess.Popen[bytes] | ForkedProcess,
        ready_fd: int,
        *,
        forks: ForkLink | None = None,
        inherited: _Inherited | None = None,
        launched_with: ServerArgs | None = None,
    ) -> None:
        """`ready_fd`: the pipe for its report. `forks`: its link, if it may become a fork server. `inherited`: of a new
        interpreter. `launched_with`: of a fork."""
        loop = asyncio.get_running_loop()
        self.role = role
        self.pid = process.pid
        self.ready: asyncio.Future[Report] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.launched_with = launched_with
        """None: it is a spare, and only loads its modules."""
        self._process = process
        self._forks = forks
        self._inherited = inherited
        self._loop = loop
        self._reports = ReportReader()
        self._reaping: asyncio.Task[None] | None = None
        self._ready_fd = ready_fd
        loop.add_reader(ready_fd, self._on_readable)

    @classmethod
    def start(
        cls, role: Role, module: str = CHILD_MODULE, *, may_fork: bool = False, listener: socket.socket | None = None
    ) -> ChildProcess:
        """A new interpreter. Until `launch` it is a spare: it only loads its modules.

        `may_fork`: it may become a fork server. Then it reports Loaded. `listener`: a socket that it inherits.
        """
        ready_fd, report_fd = os.pipe()
        forks: ForkLink | None = None
        try:
            forks = ForkLink() if may_fork else None
            inherited = _Inherited(
                report_fd,
                None if forks is None else forks.childs_end.fileno(),
                None if listener is None else listener.fileno(),
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid()), role],
                stdin=subprocess.PIPE,
                env=_environment(role),
                pass_fds=[fd for fd in inherited if fd is not None],
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(ready_fd)
            if forks is not None:
                forks.close()
            raise
        finally:
            os.close(report_fd)
            if forks is not None:
                forks.childs_end.close()
        return cls(role, process, ready_fd, forks=forks, inherited=inherited)

    def launch(self, server_args: ServerArgs, run_dir: RunDir) -> ChildProcess:
        """Tells a spare what to do. Must be called once."""
        assert self._process.stdin is not None and self._inherited is not None and self.launched_with is None
        self.launched_with = server_args
        with contextlib.suppress(BrokenPipeError):  # the child is dead already; the ready pipe will report that
            spec = LaunchSpec(server_args, str(run_dir.path), run_dir.life, run_dir.work_dir, *self._inherited)
            write_spec(self._process.stdin.fileno(), spec)
        return self

    async def fork(self, server_args: ServerArgs, run_dir: RunDir) -> ChildProcess:
        """A fork of this process, which has reported Loaded. `server_args`: those of this process, but the adapters may
        be others. Raises OSError if there is no fork."""
        assert self._forks is not None and self.launched_with is not None
        spec = LaunchSpec(server_args, str(run_dir.path), run_dir.life, run_dir.work_dir, -1)
        process, ready_fd = await self._forks.fork(spec)
        return ChildProcess(self.role, process, ready_fd, launched_with=server_args)

    def ask_to_stop(self) -> None:
        """Asks the child to stop. A starting child exits at once, a running one after its current step."""
        if self.launched_with is None:
            self.kill()
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(STOP)

    @property
    def returncode(self) -> int:
        """As of subprocess, once the process has ended."""
        return int(self._process.returncode or 0)

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
        if self._forks is not None:
            self._forks.close()
        code = self.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {'unknown' if code == UNKNOWN_EXIT else code}"
        if not self.ready.done():
            self._fail_ready(DiedAtStart(f"the {self.role} process died while it started ({how})"))
        self.ended.set_result(f"the {self.role} process died ({how})")

    def _fail_ready(self, error: Exception) -> None:
        self.ready.set_exception(error)
        self.ready.exception()  # marks it as retrieved: when both children fail, only one future is awaited


async def stop_children(children: Collection[ChildProcess]) -> None:
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
    # The child searches for modules in the same places as this process. This process may have found the package in its
    # working directory (the entry ""), and may have left that directory since.
    found_in = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    environment["PYTHONPATH"] = os.pathsep.join(_absolute([*sys.path, found_in]))
    return environment


def _absolute(paths: Iterable[str]) -> Iterator[str]:
    """Without the relative ones if the working directory was removed: they lead nowhere."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            yield os.path.abspath(path)
