"""When each process of the engine sent its last message."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..srt.io_struct import BatchTextOut, DetokenizerAlive, ToTokenizer

STOPPED_LATE_S = 1.0
"""A stopped process that is silent for longer is late."""
LATE_S = 10.0
"""Any other process that is silent for longer is late. An ordinary step is shorter, even on a slow machine."""


class Heartbeats:
    """Every message counts as a heartbeat. A text comes from the detokenizer, which has it from the scheduler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds from any start."""
        self._clock = clock
        self.is_stopped = False
        """A signal has stopped one of the processes."""
        self.reset()

    def reset(self) -> None:
        """The processes have just started."""
        self._scheduler = self._detokenizer = self._clock()

    def hear(self, message: ToTokenizer) -> None:
        now = self._clock()
        if isinstance(message, BatchTextOut):
            self._scheduler = self._detokenizer = now
        elif isinstance(message, DetokenizerAlive):
            self._detokenizer = now
        else:
            self._scheduler = now

    @property
    def longest_silence_s(self) -> float:
        """That of the process that has been silent longest."""
        return self._clock() - min(self._scheduler, self._detokenizer)

    @property
    def is_late(self) -> bool:
        """A process is silent for so long that streams send comments instead."""
        return self.longest_silence_s > (STOPPED_LATE_S if self.is_stopped else LATE_S)

    def silent_s(self, role: str) -> float:
        """Seconds since the last heartbeat of the process with this role."""
        return self._clock() - (self._detokenizer if role == "detokenizer" else self._scheduler)
