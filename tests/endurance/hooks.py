"""Faults that a process must do to itself: what the harness asks for, and what the processes under test do about it.

The harness and the processes share a folder, which the environment variable ENDURANCE names. A file in it is a request
for one fault; the process that takes the file has the fault. `clock` is a mapped file with the seconds that the wall
clock is wrong by.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

VARIABLE = "ENDURANCE"
STEP_FAULTS = ("nan", "allocation", "hang")
STALL_S = 0.1
"""A turn of an event loop that takes longer is a stall."""
_TICK_S = 0.02
_CLOCK = struct.Struct("<d")


class Stall(msgspec.Struct):
    """An event loop that did not turn for longer than STALL_S."""

    at: float
    """Unix time of its end."""
    late_s: float
    busy_s: float
    """Processor time that the loop's thread used meanwhile. Much less than `late_s`: the thread had no core."""
    stack: str
    """What the thread did after STALL_S."""

    @property
    def is_own_fault(self) -> bool:
        return self.busy_s >= STALL_S


class Hooks:
    """The folder, for both sides."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stalls = folder / "stalls.jsonl"
        self._clock_file = folder / "clock"

    @classmethod
    def of_this_process(cls) -> Hooks:
        return cls(Path(os.environ[VARIABLE]))

    # The harness' side

    def create(self) -> Hooks:
        self._folder.mkdir(parents=True)
        self._clock_file.write_bytes(_CLOCK.pack(0.0))
        return self

    def ask_for(self, fault: str) -> None:
        (self._folder / fault).touch()

    def withdraw(self, fault: str) -> bool:
        """Returns whether the fault was still waiting for a process."""
        return self._take(fault)

    def set_clock(self, wrong_by_s: float) -> None:
        with self._clock_file.open("r+b") as file:
            file.write(_CLOCK.pack(wrong_by_s))

    def stalls(self) -> list[Stall]:
        if not self._stalls.exists():
            return []
        return [msgspec.json.decode(line, type=Stall) for line in self._stalls.read_bytes().splitlines()]

    # The side of the processes under test

    def take_step_fault(self) -> str | None:
        """The fault that the next step of the model has."""
        if not any(entry.name in STEP_FAULTS for entry in os.scandir(self._folder)):
            return None
        return next((fault for fault in STEP_FAULTS if self._take(fault)), None)

    def bend_clock(self) -> None:
        """From now on `time.time` of this process is wrong by what the file says. Log lines keep their times."""
        with self._clock_file.open("rb") as file:
            page = mmap.mmap(file.fileno(), _CLOCK.size, access=mmap.ACCESS_READ)
        honest = time.time
        time.time = lambda: honest() + _CLOCK.unpack_from(page)[0]

    def watch_loop(self, make_loop: Callable[[], object]) -> Callable[[], object]:
        """Makes loops whose stalls are noted."""

        def watched() -> object:
            loop = make_loop()
            _LoopWatch(loop, threading.get_ident(), self._stalls)
            return loop

        return watched

    def _take(self, fault: str) -> bool:
        try:
            (self._folder / fault).unlink()
        except FileNotFoundError:
            return False
        return True


class _LoopWatch:
    """A timer in the loop says that it turns; a thread beside it looks when it does not."""

    def __init__(self, loop, thread_id: int, to: Path) -> None:
        self._loop = loop
        self._thread_id = thread_id
        self._to = to
        self._turned = time.monotonic()
        self._busy_s = time.thread_time()
        self._stack = ""
        self._tick()
        threading.Thread(target=self._look, daemon=True).start()

    def _tick(self) -> None:
        now, busy_s = time.monotonic(), time.thread_time()
        late_s = now - self._turned - _TICK_S
        if late_s > STALL_S:
            stall = Stall(time.time(), round(late_s, 3), round(busy_s - self._busy_s, 3), self._stack)
            with self._to.open("ab") as file:
                file.write(msgspec.json.encode(stall) + b"\n")
        self._turned, self._busy_s, self._stack = now, busy_s, ""
        self._loop.call_later(_TICK_S, self._tick)

    def _look(self) -> None:
        while True:
            time.sleep(STALL_S / 4)
            if not self._stack and time.monotonic() - self._turned > STALL_S:
                self._stack = _innermost(sys._current_frames().get(self._thread_id))


def _innermost(frame) -> str:
    names = []
    while frame is not None and len(names) < 8:
        names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)
