"""Why an engine died, whether it may be restarted, and the report about it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ... import __version__
from ...managers.generation import Generation
from ...managers.recovery import Blame
from .. import env
from ..io_struct import SchedulerState
from ..server_args import ServerArgs
from ..step_journal import Journal
from .forks import UNKNOWN_EXIT

_DEATHS_OF_CULPRIT = 2
_REPORTS_KEPT = 20
_MOST_REQUESTS = 256
"""Requests in a report. Those of the fatal step come first."""
_RETRY_S = 1.0
_MOST_DOUBLINGS = 5
_SLOWER_START = 5
"""A start may take so many times as long as an earlier one: weights may come from a disk instead of memory."""


def start_limit_s(watchdog_timeout_s: float, earlier_s: float) -> float:
    """Processes that are not ready by then are killed. `earlier_s`: how long such a start took before."""
    return max(watchdog_timeout_s, _SLOWER_START * earlier_s)


def retry_pause_s(num_failures: int) -> float:
    """The pause before the next start, after so many in a row have failed: none, 1 s, 2 s, 4 s and so on up to 32 s.

    The same settings have worked before, so the cause may pass: a full disk, too little memory, a file being replaced.
    """
    return _RETRY_S * 2 ** min(num_failures - 1, _MOST_DOUBLINGS) if num_failures else 0.0


class RestartBudget:
    """At most `limit` restarts within `window_s` seconds. Those of culprits do not count: at most `limit` culprits."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._window_s = window_s
        self._clock = clock
        self._taken: deque[float] = deque()
        self._culprits: deque[float] = deque()

    def take(self) -> bool:
        """Takes one restart. Returns False if all are used up."""
        now = self._clock()
        self._forget(self._taken, now)
        if len(self._taken) >= self.limit:
            return False
        self._taken.append(now)
        return True

    def give_back(self) -> None:
        """A request was proved to be the cause of the last two deaths, and has ended.

        At most `limit` times within the window. The restarts of further culprits count, so there is always an end.
        """
        now = self._clock()
        self._forget(self._culprits, now)
        if len(self._culprits) < self.limit:
            self._culprits.append(now)
            for _ in range(min(_DEATHS_OF_CULPRIT, len(self._taken))):
                self._taken.pop()

    def _forget(self, times: deque[float], now: float) -> None:
        while times and now - times[0] >= self._window_s:
            times.popleft()

    @property
    def num_taken(self) -> int:
        """Restarts in the window, as of the last `take`."""
        return len(self._taken)


class Death(NamedTuple):
    """The death of a child process."""

    role: str
    message: str
    returncode: int
    """As of subprocess: minus the signal."""
    was_hung: bool
    """The watchdog killed it."""
    was_oom: bool
    """The kernel has killed a process because memory was short."""
    stacks: str = ""
    """Those of all threads when the watchdog killed it; empty if it did not answer."""
    has_ended_fork_servers: bool = False
    """The engine has ended its fork servers itself, after an update of the weights."""

    @property
    def is_from_outside(self) -> bool:
        """Another program killed the process, so no request is the cause. An unknown end counts as that if another
        program killed the fork server, too. The next engine has a new one, so if a request is the cause, its next
        deaths are known."""
        killed = self.returncode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
        killed |= self.returncode == UNKNOWN_EXIT and not self.has_ended_fork_servers
        return killed and not self.was_hung and not self.was_oom

    def blame(self, journal: Journal, *, loads_weights: bool) -> Blame | None:
        """The requests that may have caused the death. None: none has. `loads_weights`: between two steps,
        the engine loads other weights or an adapter."""
        if self.is_from_outside:
            return None
        if self.role == "scheduler" and loads_weights and journal.is_between_steps:
            return None
        if self.role != "scheduler" or journal.rows is None:
            return Blame(None)
        return Blame({row.key: row.position for row in journal.rows})


def crash_report(
    death: Death,
    journal: Journal,
    server_args: ServerArgs,
    state: SchedulerState | None,
    samples: list[Generation],
    num_restarts: int,
) -> dict[str, Any]:
    """The facts about a death, for a developer. It has the lengths of what clients have sent, and no text of theirs,
    unless the setting `crash_report_requests` asks for all.
    """
    positions = {row.key: row.position for row in journal.rows or ()}
    described = sorted(samples, key=lambda one: one.key not in positions)[:_MOST_REQUESTS]
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "version": __version__,
        "process": death.role,
        "death": death.message,
        "was_hung": death.was_hung,
        "was_oom": death.was_oom,
        "stacks": death.stacks.splitlines(),
        "num_earlier_restarts": num_restarts,
        "settings": server_args.without_secrets(),
        "scheduler_state": msgspec.to_builtins(state),
        "last_steps": [step._asdict() for step in journal.last_steps],
        "fatal_step_is_known": journal.rows is not None,
        "num_requests": len(samples),
        "requests": [_described(one, positions, whole=server_args.crash_report_requests) for one in described],
    }


def _described(sample: Generation, positions: dict[str, int], *, whole: bool) -> dict[str, Any]:
    assert sample.request is not None
    sampling = msgspec.to_builtins(sample.request.options.sampling)
    if not whole:
        sampling = {name: _without_text(value) for name, value in sampling.items()}
    described = {
        "id": sample.rid,
        "key": sample.key,
        "sample": sample.index,
        "in_fatal_step": sample.key in positions,
        "prompt_tokens": len(sample.prompt_ids),
        "output_tokens": positions.get(sample.key, len(sample.output_ids)),
        "num_recoveries": sample.num_recoveries,
        "stream": sample.request.options.stream,
        "sampling": sampling,
    }
    return described | ({"prompt_ids": list(sample.prompt_ids), "output_ids": sample.output_ids} if whole else {})


def _without_text(value: Any) -> Any:
    """Numbers and None. Of anything else the size: it may have text of the client, such as a grammar."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        return f"{len(value)} characters"
    return f"{len(value)} entries"


def write_report(report: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes a report and removes old ones. `folder`: default `crashes` in the cache folder. Raises OSError."""
    if folder is None:
        cache = env.cache_folder()
        if cache is None:
            raise OSError("there is no home folder")
        folder = cache / "crashes"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{report['num_earlier_restarts']}.json"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
    # If the clock was set back, the name of the new report may come before those of old ones.
    others = sorted(set(folder.glob("crash-*.json")) - {path})
    for old in others[: 1 - _REPORTS_KEPT]:
        old.unlink(missing_ok=True)
    return path
