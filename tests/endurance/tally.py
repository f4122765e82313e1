"""What has happened to the requests of all clients: their answers, their errors, and how long their streams waited."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_LONG_SILENCE_S = 1.0
_LONG_PAUSE_S = 0.25


@dataclass(frozen=True)
class Wait:
    """A part of a stream that had begun. Times are of `time.monotonic`."""

    case: str
    began: float
    ended: float

    @property
    def lasted_s(self) -> float:
        return self.ended - self.began


class Waits(NamedTuple):
    """The long waits."""

    silences: list[Wait]
    """For any byte: a comment is a sign of life. Longer than _LONG_SILENCE_S."""
    pauses: list[Wait]
    """For an event. Longer than _LONG_PAUSE_S."""


@dataclass(frozen=True)
class Failure:
    """A request that has ended with an error that says why. Times are of `time.monotonic`."""

    name: str
    """Of the case, and whether it was streamed."""
    error: str
    """Its code or type, and its message."""
    had_begun: bool
    """A stream that was lost. Otherwise the request was refused: the error came before the answer."""
    began: float
    ended: float

    @property
    def text(self) -> str:
        """The error without numbers, so that equal errors have equal texts."""
        return "".join("N" if char.isdigit() else char for char in self.error)[:300]


class StreamRecord:
    """The data of one stream, and its long waits. It is complete also if the stream fails."""

    def __init__(self, case: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.data = bytearray()
        self.waits = Waits([], [])
        self.began = clock()
        self._case = case
        self._clock = clock
        self._last_bytes = self._last_event = float("inf")

    def on_data(self, piece: bytes, _: float = 0.0) -> None:
        self.data.extend(piece)
        now = self._clock()
        self._note(self.waits.silences, self._last_bytes, now)
        self._last_bytes = now
        if b"data: " in piece:
            self._note(self.waits.pauses, self._last_event, now, _LONG_PAUSE_S)
            self._last_event = now

    def end(self) -> float:
        """The time of the end, which also ends the last waits."""
        now = self._clock()
        self._note(self.waits.silences, self._last_bytes, now)
        self._note(self.waits.pauses, self._last_event, now, _LONG_PAUSE_S)
        self._last_bytes = self._last_event = float("inf")
        return now

    def _note(self, waits: list[Wait], began: float, ended: float, longer_than_s: float = _LONG_SILENCE_S) -> None:
        if ended - began > longer_than_s:
            waits.append(Wait(self._case, began, ended))


@dataclass
class Tally:
    """The counts of all clients."""

    completed: int = 0
    streams: int = 0
    """Completed ones that were streamed."""
    resumed: Counter[str] = field(default_factory=Counter)
    """Streams that completed after a restart of the engine: by their paths."""
    continued: int = 0
    """How often a stream was continued at another process of the server."""
    sent_again: int = 0
    """Requests that another process of the server got, too, because the first one had not begun to answer."""
    new_schemas: Counter[str] = field(default_factory=Counter)
    """Requests with a schema that no request had before: by what has come of them. Those on purpose are left out."""
    left: int = 0
    """Requests whose client has left on purpose."""
    failures: list[Failure] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What must not happen: another answer, an end without a reason, a request that hangs."""
    waits: Waits = field(default_factory=lambda: Waits([], []))
    """Those of all streams that had begun, also of those that failed."""

    @property
    def refused(self) -> Counter[str]:
        """Errors before the answer began: by their text."""
        return Counter(one.text for one in self.failures if not one.had_begun)

    @property
    def lost(self) -> Counter[str]:
        """Errors in the middle of a stream: by their text."""
        return Counter(one.text for one in self.failures if one.had_begun)

    @property
    def requests(self) -> int:
        return self.completed + self.left + len(self.failures) + len(self.wrong)

    def note_waits(self, waits: Waits) -> None:
        self.waits.silences.extend(waits.silences)
        self.waits.pauses.extend(waits.pauses)
