"""Finds a process of the engine whose loop hangs, and gets the stacks of its threads."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import time
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR1
"""A child process answers it with the stacks of all its threads."""
_LONGEST_INTERVAL_S = 0.5
_POLL_S = 0.02
_ANSWER_S = 1.0
"""How long to wait for the first line of the stacks. A stopped process writes none."""
_QUIET_S = 0.25
"""The stacks are complete when nothing was added to them for so long."""


class Verdict(Enum):
    REPORT = "report"
    """A step has taken longer than the soft timeout."""
    END = "end"
    """A step has taken longer than the timeout."""


class HangDetector:
    """Decides what a silent process means. A hang is reported once, and ended once.

    It must be too silent at two looks in a row: after a halt of this process, the messages of the others are read
    between two looks.
    """

    def __init__(self, timeout_s: float, soft_timeout_s: float | None) -> None:
        """`soft_timeout_s`: None: nothing is only reported."""
        self._limits = {Verdict.END: timeout_s}
        if soft_timeout_s is not None:
            self._limits[Verdict.REPORT] = soft_timeout_s
        self._num_looks = dict.fromkeys(self._limits, 0)
        self.interval_s = min(min(self._limits.values()) / 4, _LONGEST_INTERVAL_S)
        """Time between two looks."""

    def look(self, silent_s: float) -> Verdict | None:
        """`silent_s`: seconds since the last message of the process. 0: it is being restarted."""
        found = None
        for verdict, limit_s in self._limits.items():
            self._num_looks[verdict] = self._num_looks[verdict] + 1 if silent_s > limit_s else 0
            if self._num_looks[verdict] == 2:
                found = found or verdict  # END comes first
        return found


class Signalled(Protocol):
    """A ChildProcess."""

    role: Any

    def send_signal(self, signum: signal.Signals) -> None: ...


async def report_hang(process: Signalled, path: Path, silent_s: float, verdict: Verdict) -> str:
    """Logs that the loop of a process does not turn, with the stacks of its threads. Returns these, as `stacks_of`."""
    stacks = await stacks_of(process, path)
    what = "killing the process" if verdict is Verdict.END else "it goes on"
    threads = f"the stacks of its threads:\n{stacks}" if stacks else "it does not tell the stacks of its threads"
    logger.error("The %s's loop has not turned for %.1f s; %s; %s", process.role, silent_s, what, threads)
    return stacks


def answer_with_stacks(path: Path) -> None:
    """From now on, this process appends the stacks of all its threads to a file when it gets STACKS_SIGNAL.

    The handler is C code, so it also runs while a thread holds the interpreter's lock in C code.
    """
    with contextlib.suppress(OSError):  # the run directory is gone: the parent has died
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # open as long as the process
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)


async def stacks_of(process: Signalled, path: Path) -> str:
    """The stacks of all threads of a process that has called `answer_with_stacks`. Empty if it does not answer."""
    start = size = _size(path)
    began = changed = time.monotonic()
    process.send_signal(STACKS_SIGNAL)
    while True:
        await asyncio.sleep(_POLL_S)
        now = time.monotonic()
        if _size(path) != size:
            size, changed = _size(path), now
        elif now - changed >= _QUIET_S and (size > start or now - began >= _ANSWER_S):
            break
    try:
        return path.read_bytes()[start:].decode("utf-8", "replace")
    except OSError:  # the process did not answer, or the engine was restarted meanwhile
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
