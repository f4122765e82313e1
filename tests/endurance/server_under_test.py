"""The server under test: its process, its log with times, its state, and what it must not leave behind."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from endurance.hooks import STEP_FAULTS, VARIABLE, Hooks
from endurance.resources import processes_of, shared_memory
from toy_engine import ServerProcess, is_gone

from tercet.benchmarks.http_client import HttpClient

_DEATH = re.compile(r"The engine has failed: ")
_NO_VERDICT = re.compile(r"A grammar .* could not be checked: its worker")
_BACK = re.compile(r"The engine runs again after")
_QUIET_S = 120.0
_START_S = 300.0
_END_S = 60.0
_GONE_S = 15.0
"""A stopped process may end only when it goes on."""


class ServerUnderTest(ServerProcess):
    """A server with hooks. Its TMPDIR and its cache are in `folder`."""

    def __init__(self, folder: Path, flags: Sequence[str], *, on_tmpfs: bool = False) -> None:
        """`on_tmpfs`: the folder is a small file system of its own."""
        self.folder = folder
        self.flags = list(flags)
        self.on_tmpfs = on_tmpfs
        self.run_dirs = folder / "run"
        self.cache = folder / "cache"
        self.run_dirs.mkdir()
        self.cache.mkdir(exist_ok=True)
        self.hooks = Hooks(folder / "hooks").create()
        self.restarts: list[tuple[float, float]] = []
        """Times of `time.monotonic`: of a death, and of the end of the restart."""
        self.num_compilations_tried_again = 0
        self.num_changes = 0
        """How often another process took the place of the server's."""
        self.is_changing = False
        """One process ends, and the next one starts."""
        self._left: list[str] = []
        """What earlier processes have left behind."""
        self._died_at: float | None = None
        self._shared_memory = shared_memory()
        self._start(flags)

    def _start(self, flags: Sequence[str]) -> None:
        env = {VARIABLE: str(self.folder / "hooks"), "XDG_CACHE_HOME": str(self.cache)}
        super().__init__(self.run_dirs, flags, module=("endurance.server",), **env)

    def change(self, signals: Sequence[signal.Signals]) -> int:
        """Ends the process by these signals, and starts the next one on the same port. Returns the exit code.

        Raises AssertionError if the next one does not start.
        """
        self.num_changes += 1
        self.is_changing = True
        processes = processes_of(self.pid)
        try:
            for one in signals:
                self.signal(one)
            code = self.exit_code(_END_S)
            self._reader.join()
            self._died_at = None
            for fault in STEP_FAULTS:  # it is not for the first steps of the next process
                self.hooks.withdraw(fault)
            self._start([*self.flags, "--port", self.url.rpartition(":")[2]])
            self.ready(_START_S)
            self._left += [f"the {role} process" for pid, role in processes.items() if not is_gone(pid, _GONE_S)]
            return code
        finally:
            self.is_changing = False

    def on_line(self, line: str) -> None:
        if _DEATH.search(line) and self._died_at is None:
            self._died_at = time.monotonic()
        elif _BACK.search(line) and self._died_at is not None:
            self.restarts.append((self._died_at, time.monotonic()))
            self._died_at = None
        elif _NO_VERDICT.search(line):
            self.num_compilations_tried_again += 1

    @property
    def is_alive(self) -> bool:
        return self.is_changing or self._process.poll() is None

    @property
    def is_restarting(self) -> bool:
        return self._died_at is not None

    async def state(self) -> dict[str, Any]:
        """/server_info."""
        client = HttpClient(self.url)
        try:
            return json.loads((await client.request("GET", "/server_info")).body)
        finally:
            await client.close()

    async def wait_until_quiet(self) -> dict[str, Any]:
        """Waits until nothing runs, and returns /server_info. It is the last one if that does not happen."""
        until = time.monotonic() + _QUIET_S
        while True:
            info = await self.state()
            state = (info.get("internal_states") or [{}])[0]
            is_quiet = state.get("num_running") == state.get("num_waiting") == 0 and not self.is_restarting
            if is_quiet or time.monotonic() > until:
                return info
            await asyncio.sleep(0.1)

    def end(self) -> list[str]:
        """Stops the server by SIGTERM. Returns what it has left behind."""
        processes = processes_of(self.pid)
        self._process.terminate()
        left = list(self._left)
        code = self.exit_code(_END_S)
        if code != 0:
            left.append(f"exit code {code} after SIGTERM")
        left += [f"the {role} process" for pid, role in processes.items() if not is_gone(pid, 10)]
        left += [f"{path.name} in TMPDIR" for path in self.run_dirs.iterdir()]
        left += [f"{name} in /dev/shm" for name in shared_memory() - self._shared_memory]
        return left


def wrong_state(info: dict[str, Any]) -> list[str]:
    """What is wrong about the state of a server that has nothing to do."""
    state = (info.get("internal_states") or [{}])[0]
    wrong = [
        f"{name} is {state.get(name)}"
        for name in ("num_running", "num_waiting", "num_protected_tokens", "num_private_tokens", "num_kv_repairs")
        if state.get(name) != 0
    ]
    free = state.get("num_free_tokens", 0) + state.get("num_evictable_tokens", 0)
    if free != state.get("max_total_num_tokens"):
        wrong.append(f"{free} of {state.get('max_total_num_tokens')} tokens of KV are free or cached")
    return wrong


class Workplace:
    """A temporary folder for one run, which SIGTERM ends as Ctrl-C does: the server ends, and the folder is removed."""

    def __enter__(self) -> Path:
        self._handler = signal.signal(signal.SIGTERM, _interrupt)
        self._path = Path(tempfile.mkdtemp(prefix="endurance-"))
        return self._path

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._handler)
        shutil.rmtree(self._path, ignore_errors=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
