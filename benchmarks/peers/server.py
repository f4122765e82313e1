"""One running server: started, waited for, watched, and ended with all of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...srt import env
from ..http_client import HttpClient, HttpError
from .linux_processes import Process, family, pss_bytes

_POLL_S = 0.05
_LOOK_S = 1.0
_ANSWER_TIMEOUT_S = 5.0
_TERM_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 10.0
_LOG_LINES = 8


class ServerFailed(Exception):
    """It did not start, did not answer as asked, or died; the message is for a person."""

    log = ""
    """The end of what the server said until then."""


class Server:
    """Starts at once, in a session of its own, so that Ctrl-C reaches the caller alone; use it as a context manager.

    A process that leaves the family before it is seen, by two forks and a session of its own, is not found.
    """

    def __init__(self, argv: Sequence[str], added_env: Mapping[str, str], log: Path) -> None:
        """Raises ServerFailed when there is no such program."""
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

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def check_alive(self, within_s: float = 0.0) -> None:
        """Raises ServerFailed if the process has ended, or ends within this time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(within_s)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ServerFailed(f"the server ended ({how})")

    async def wait_until_healthy(self, client: HttpClient, timeout_s: float) -> None:
        """Until GET /health is answered with 200. Raises ServerFailed."""
        next_look = 0.0
        while True:
            self.check_alive()
            if time.monotonic() > next_look:  # rarely: it takes milliseconds from a server that starts
                self.processes()  # sees sessions that begin meanwhile
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
        """All that belong to it, by process id."""
        found = family(self._process.pid, self._sessions)
        self._sessions |= {one.session for one in found.values()}
        return found

    def pss_bytes(self) -> int:
        return sum(pss_bytes(pid) for pid in self.processes())

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Ends it: SIGTERM, then SIGKILL to whoever is left. None of its processes runs afterwards."""
        self.processes()
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_TERM_TIMEOUT_S)
        finally:  # even when Ctrl-C is pressed once more
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
            self._process.poll()  # takes its exit status
        self._process.wait()


def run_to_end(argv: Sequence[str]) -> str:
    """What a program says that makes something. Raises ServerFailed when it fails, with the end of that."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise ServerFailed(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        raise ServerFailed(f"{' '.join(argv)} failed:\n{_last_lines(done.stdout)}")
    return done.stdout.decode(errors="replace")


def last_lines(log: Path) -> str:
    """The end of what a server said."""
    return _last_lines(log.read_bytes())


def _last_lines(said: bytes) -> str:
    lines = [line.rstrip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LOG_LINES:])


def cpu_s_by_name(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[str, float]:
    """Processor seconds between two looks at a server; processes of one name together."""
    used: Counter[str] = Counter()
    for pid, one in after.items():
        used[one.name] += one.cpu_s - (before[pid].cpu_s if pid in before else 0.0)  # type: ignore[assignment]
    return {name: round(seconds, 3) for name, seconds in used.items()}


def free_port() -> int:
    """One that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
