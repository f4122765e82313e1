"""One running server: starts it, waits until it is ready, watches it, and stops all of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..srt import env
from .http_client import HttpClient, HttpError
from .linux_processes import Process, family, pss_bytes

_POLL_S = 0.05
_LOOK_S = 1.0
_ANSWER_TIMEOUT_S = 5.0
_TERM_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0
_LOG_LINES = 8


class ServerFailed(Exception):
    """The server did not start, gave a wrong answer, or died. The message is shown to the user."""

    log = ""
    """The end of the server's log at that time."""


class Server:
    """A server process, started by the constructor; `running_server` also stops it.

    It runs in its own session, so that Ctrl-C reaches only the caller. A process that detaches itself with two forks
    and a new session, before it has been seen, is not found.
    """

    def __init__(self, argv: Sequence[str], added_env: Mapping[str, str], log: Path) -> None:
        """Starts the server. Raises ServerFailed if the program does not exist."""
        self.log = log
        self.began_s = time.monotonic()
        with log.open("wb") as file:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=env.with_added(added_env),
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerFailed(f"{argv[0]}: {error.strerror}") from error
        self._sessions = {self._process.pid}

    def check_alive(self, within_s: float = 0.0) -> None:
        """Raises ServerFailed if the process has ended or ends within `within_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(within_s)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerFailed(f"the server ended ({how})")

    async def wait_until_healthy(self, client: HttpClient, timeout_s: float) -> None:
        """Waits until GET /health answers 200. Raises ServerFailed."""
        next_look = 0.0
        while True:
            self.check_alive()
            if time.monotonic() > next_look:  # at long intervals, because it costs the starting server milliseconds
                self.processes()  # notes the sessions that the server has started
                next_look = time.monotonic() + _LOOK_S
            why = "no answer"
            with contextlib.suppress(TimeoutError):
                try:
                    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                        answer = await client.request("GET", "/health")
                    if answer.status == 200:
                        return
                    why = f"{answer.status} {answer.reason}"
                except HttpError as error:
                    why = str(error)
            if time.monotonic() > self.began_s + timeout_s:
                raise ServerFailed(f"the server was not ready within {timeout_s:g} s: {why}")
            await asyncio.sleep(_POLL_S)

    def processes(self) -> dict[int, Process]:
        """All processes of the server, by process id."""
        found = family(self._process.pid, self._sessions)
        self._sessions |= {process.session for process in found.values()}
        return found

    def pss_bytes(self) -> int:
        return sum(pss_bytes(pid) for pid in self.processes())

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Stops the server: SIGTERM first, then SIGKILL for the remaining processes. Waits until all have ended."""
        self.processes()
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TERM_TIMEOUT_S)
        finally:  # also at a second Ctrl-C
            self._kill()

    def _kill(self) -> None:
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while left := self.processes():
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes are alive after SIGKILL: {', '.join(map(str, left))}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
            self._process.poll()  # reaps the process
        self._process.wait()


@contextlib.contextmanager
def running_server(argv: Sequence[str], added_env: Mapping[str, str], log: Path) -> Iterator[Server]:
    """A context in which a server runs. Raises ServerFailed if the program does not exist."""
    with contextlib.ExitStack() as stack:
        with _signals_held():  # between its start and the callback, the server would be left behind
            server = Server(argv, added_env, log)
            stack.callback(server.stop)
        yield server


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A context in which signals with a Python handler wait. The handlers run at its end."""
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    waiting: list[int] = []
    try:
        for signum, handler in handlers.items():
            if callable(handler):
                signal.signal(signum, lambda signum, frame: waiting.append(signum))
        yield
    finally:
        for signum, handler in handlers.items():
            if callable(handler):
                signal.signal(signum, handler)
        for held in waiting:
            signal.raise_signal(held)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP do what Ctrl-C does: servers are stopped, and temporary files removed.

    Without it, they would end this process at once, and the servers would run on in their own sessions. A signal that
    is ignored, as SIGHUP by nohup, stays so.
    """

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt  # SIGINT itself may be ignored, as in a job that a script runs in the background

    heard = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, interrupt) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_to_end(argv: Sequence[str]) -> str:
    """Runs a program to its end and returns its output. Raises ServerFailed, with the end of the output, on failure."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise ServerFailed(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        raise ServerFailed(f"{' '.join(argv)} failed:\n{_last_lines(done.stdout)}")
    return done.stdout.decode(errors="replace")


def last_lines(log: Path) -> str:
    """The last lines of a server's log."""
    return _last_lines(log.read_bytes())


def _last_lines(said: bytes) -> str:
    lines = [line.rstrip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LOG_LINES:])


def cpu_s_by_name(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[str, float]:
    """Processor seconds between two snapshots of a server's processes, summed by process name."""
    used: defaultdict[str, float] = defaultdict(float)
    for pid, process in after.items():
        used[process.name] += process.cpu_s - (before[pid].cpu_s if pid in before else 0.0)
    return {name: round(seconds, 3) for name, seconds in used.items()}


def free_port() -> int:
    """A port on which no process listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
