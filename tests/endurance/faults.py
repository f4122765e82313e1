"""The faults of a chaos run: what each does to a running server, and when it is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
from endurance.hooks import STEP_FAULTS, VARIABLE
from endurance.resources import processes_of
from endurance.server_under_test import ServerUnderTest

from tercet.model_executor.weights.cache_folder import SUFFIXES
from tercet.srt.machine.processor_time import processor_time_s

_TAKEN_WITHIN_S = 5.0
"""A step fault that no step has taken by then is withdrawn: nothing runs."""
_SECOND_SERVER_S = 60.0
_SHORT_STOP_S = 2.0
OF_THE_SERVER = ("kill the server", "restart the server")
"""Only clients that continue their streams at the next process outlive these."""
_ALONE = frozenset(("full disk", "short memory", "second server", *OF_THE_SERVER))
"""One at a time: a server need not start on a full disk, in too little memory, or on a port that is not free."""
_POLL_S = 0.05
_COMPILES_WITHIN_S = 3.0
_LOOK_S = 0.005
_LONG_STOPS = 0.25
"""Share of the stops that may be that long."""


@dataclass
class Event:
    """One fault. Times are of `time.monotonic`."""

    kind: str
    began: float
    ended: float
    skipped: str = ""
    """Why it could not be done."""


class Skipped(Exception):
    """This fault cannot be done here and now. The message says why."""


class Faults:
    """The faults by their kinds. `rng` is used by nothing else, so that a seed gives the same faults."""

    def __init__(self, server: ServerUnderTest, hang_s: float, max_stop_s: float = 10.0) -> None:
        """`hang_s`: how long a hanging step hangs, that is, until the watchdog kills it. `max_stop_s`: the longest stop
        of a process other than HTTP, which must be shorter than the watchdog's time."""
        self.events: list[Event] = []
        self.wrong: list[str] = []
        """What a fault has shown about the server that must not be."""
        self.num_compilations_hit = 0
        """Faults of the grammar worker while it compiled."""
        self._alone = asyncio.Lock()
        self._is_changing_server = False
        self._server = server
        self._hang_s = hang_s
        self._max_stop_s = max_stop_s
        self._asking = {fault: asyncio.Lock() for fault in STEP_FAULTS}
        self._kinds: dict[str, tuple[int, Callable[[random.Random], Awaitable[None]]]] = {
            "kill the scheduler": (3, lambda _: self._signal("scheduler", signal.SIGKILL)),
            "kill the detokenizer": (3, lambda _: self._signal("detokenizer", signal.SIGKILL)),
            "kill the grammar worker": (2, lambda _: self._signal("grammar", signal.SIGKILL)),
            "kill the spare": (2, lambda _: self._signal("spare", signal.SIGKILL)),
            "kill the detokenizer spare": (1, lambda _: self._signal("detokenizer spare", signal.SIGKILL)),
            "stop the scheduler": (2, lambda rng: self._pause("scheduler", rng)),
            "stop the detokenizer": (2, lambda rng: self._pause("detokenizer", rng)),
            "stop the grammar worker": (1, lambda rng: self._pause("grammar", rng)),
            "stop the spare": (1, lambda rng: self._pause("spare", rng)),
            "stop the detokenizer spare": (1, lambda rng: self._pause("detokenizer spare", rng)),
            "stop the HTTP process": (2, self._pause_http),
            "invalid logits": (3, lambda _: self._in_a_step("nan", 0.0)),
            "failed allocation": (2, lambda _: self._in_a_step("allocation", 0.0)),
            "hanging step": (1, lambda _: self._in_a_step("hang", self._hang_s)),
            "full disk": (2, self._fill_disk),
            "short memory": (2, self._shorten_memory),
            "clock jumps": (3, self._jump_clock),
            "corrupt weight cache": (1, lambda rng: self._corrupt_weight_cache(rng)),
            "second server": (1, lambda _: self._second_server()),
            "kill the server": (3, lambda _: self._change_server([signal.SIGKILL])),
            "restart the server": (2, lambda rng: self._change_server([signal.SIGTERM] * rng.randint(1, 2))),
        }

    @classmethod
    def all_kinds(cls) -> list[str]:
        """`kinds`, without a server."""
        return cls(cast(ServerUnderTest, None), hang_s=0.0).kinds

    @property
    def kinds(self) -> list[str]:
        """Those that need no clients that continue their streams."""
        return [kind for kind in self._kinds if kind not in OF_THE_SERVER]

    def draw(self, rng: random.Random, only: Sequence[str]) -> str:
        kinds = only or self.kinds
        return rng.choices(kinds, [self._kinds[kind][0] for kind in kinds])[0]

    async def happen(self, kind: str, rng: random.Random) -> None:
        async with self._alone if kind in _ALONE else contextlib.nullcontext():
            while self._is_changing_server:  # a process that starts has no guards yet
                await asyncio.sleep(_POLL_S)
            await self._happen(kind, rng)

    async def _happen(self, kind: str, rng: random.Random) -> None:
        event = Event(kind, time.monotonic(), time.monotonic())
        self.events.append(event)
        try:
            await self._kinds[kind][1](rng)
        except Skipped as why:
            event.skipped = str(why)
        except (psutil.NoSuchProcess, ProcessLookupError):
            event.skipped = "the process has just ended"
        event.ended = time.monotonic()

    def _pid(self, role: str) -> int:
        for pid, found in processes_of(self._server.pid).items():
            if found == role:
                return pid
        raise Skipped(f"there was no {role} process")

    async def _at_work(self, role: str) -> int:
        """The process. The grammar worker in the middle of a compilation, if one begins soon."""
        pid = self._pid(role)
        if role == "grammar":
            used_s, until = processor_time_s(pid), time.monotonic() + _COMPILES_WITHIN_S
            while (is_idle := processor_time_s(pid) <= used_s) and time.monotonic() < until:
                await asyncio.sleep(_LOOK_S)
            self.num_compilations_hit += not is_idle
        return pid

    async def _signal(self, role: str, signum: signal.Signals) -> None:
        psutil.Process(await self._at_work(role)).send_signal(signum)

    async def _pause(self, role: str, rng: random.Random) -> None:
        longest_s = self._max_stop_s if rng.random() < _LONG_STOPS else min(self._max_stop_s, _SHORT_STOP_S)
        await self._stop(await self._at_work(role), rng.uniform(0.1, longest_s))

    async def _pause_http(self, rng: random.Random) -> None:
        """The server's process, or one of its HTTP workers."""
        found = processes_of(self._server.pid)
        pids = [pid for pid, role in found.items() if role in ("http", "http_worker")]
        await self._stop(rng.choice(pids), rng.uniform(0.1, _SHORT_STOP_S))

    async def _stop(self, pid: int, for_s: float) -> None:
        process = psutil.Process(pid)
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            process.send_signal(signal.SIGCONT)

    async def _in_a_step(self, fault: str, then_s: float) -> None:
        hooks = self._server.hooks
        async with self._asking[fault]:  # otherwise one of two equal faults could withdraw the other
            hooks.ask_for(fault)
            await asyncio.sleep(0.5)
            until = time.monotonic() + _TAKEN_WITHIN_S
            while time.monotonic() < until and self._server.is_restarting:
                await asyncio.sleep(0.1)
            if hooks.withdraw(fault):
                raise Skipped("no step was computed")
        await asyncio.sleep(then_s)

    async def _fill_disk(self, rng: random.Random) -> None:
        """Fills the small file system that TMPDIR and the cache are on. What is written meanwhile fails."""
        if not self._server.on_tmpfs:
            raise Skipped("a tmpfs cannot be mounted here")
        ballast = self._server.folder / "ballast"
        try:
            space = os.statvfs(self._server.folder)
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize)
                file.seek(0, os.SEEK_END)
                while file.write(bytes(space.f_frsize)):
                    pass
            if rng.random() < 0.5:
                await self._signal("scheduler", signal.SIGKILL)
            await asyncio.sleep(rng.uniform(0.5, 2.0))
        finally:
            ballast.unlink(missing_ok=True)

    async def _shorten_memory(self, rng: random.Random) -> None:
        """Lets the address space of a process grow by one more MiB only, for a while."""
        pid = self._pid(rng.choice(["scheduler", "detokenizer", "http"]))
        size = psutil.Process(pid).memory_info().vms
        try:
            resource.prlimit(pid, resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
        except (PermissionError, ValueError) as error:
            raise Skipped(f"the limit cannot be set: {error}") from None
        await asyncio.sleep(rng.uniform(0.2, 1.5))
        for one in (pid, *processes_of(self._server.pid)):  # a process inherits the limit of the one that starts it
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(one, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def _jump_clock(self, rng: random.Random) -> None:
        self._server.hooks.set_clock(rng.choice([-1e9, -3600.0, -1.0, 1.0, 3600.0, 1e9, 0.0]))

    async def _corrupt_weight_cache(self, rng: random.Random) -> None:
        """Changes a byte of an entry, or cuts it, and kills what has loaded it, so that it is read again.

        The damaged file is a new one: what has mapped the old one is not what is tested.
        """
        entries = sorted(path for path in self._server.cache.rglob("*") if path.suffix in SUFFIXES)
        if not entries:
            raise Skipped("the model needs no weight cache")
        entry = rng.choice(entries)
        content = bytearray(entry.read_bytes())
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        else:
            content[rng.randrange(len(content))] ^= 0x55
        entry.unlink()
        entry.write_bytes(content)
        with contextlib.suppress(Skipped):
            await self._signal("spare", signal.SIGKILL)
        await self._signal("scheduler", signal.SIGKILL)

    async def _change_server(self, signals: Sequence[signal.Signals]) -> None:
        """Another process takes the place of the server. A second SIGTERM ends the wait for running requests."""
        self._is_changing_server = True
        try:
            code = await asyncio.to_thread(self._server.change, signals)
        except AssertionError:
            self.wrong.append(f"the server did not start again: {self._server.log[-1500:]}")
            return
        finally:
            self._is_changing_server = False
        if signals[0] is signal.SIGTERM and code != 0:
            self.wrong.append(f"exit code {code} after SIGTERM")

    async def _second_server(self) -> None:
        """A server on the port of this one must end with a message, and must not disturb this one."""
        port = self._server.url.rpartition(":")[2]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), VARIABLE: str(self._server.folder / "hooks")}
        second = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "endurance.server", *self._server.flags, "--port", port),
            env=env,
            stderr=subprocess.PIPE,
        )
        try:
            _, said = await asyncio.wait_for(second.communicate(), _SECOND_SERVER_S)
        except TimeoutError:
            second.kill()
            await second.wait()
            self.wrong.append("a second server on the port did not end")
            return
        if second.returncode != 1 or b"Cannot listen on" not in said:
            self.wrong.append(f"a second server on the port ended with code {second.returncode}: {said[-300:]!r}")


def tmpfs(folder: Path, size_mib: int) -> bool:
    """Mounts a small file system on an empty folder. Returns False where that is not allowed."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "endurance", str(folder)], capture_output=True
    )
    return done.returncode == 0


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)
