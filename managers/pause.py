"""A pause of the scheduler: it launches no steps, and requests stay as they are until generation continues."""

from __future__ import annotations

from ..srt.pause_messages import ContinueReq, PauseReply, PauseReq
from .planner import Planner
from .queue_limits import QueueLimits
from .scheduler_io import SchedulerIO
from .timeouts import Timeouts


class Pause:
    """Whether generation is paused. New requests wait; aborts and calls are handled as usual."""

    def __init__(self, planner: Planner, timeouts: Timeouts, queue_limits: QueueLimits, io: SchedulerIO) -> None:
        self.is_on = False
        self._planner = planner
        self._timeouts = timeouts
        self._queue_limits = queue_limits
        self._io = io
        self._begun: list[PauseReq] = []
        """Requests for a pause whose last step may still be in flight."""

    @property
    def is_beginning(self) -> bool:
        return bool(self._begun)

    def begin(self, message: PauseReq) -> None:
        """No step is planned from now on. `complete` must follow when the last one is processed."""
        self.is_on = True
        self._timeouts.pause()
        self._queue_limits.on_pause()
        self._planner.on_pause()
        self._begun.append(message)

    def complete(self) -> None:
        """No step is in flight, and every aborted request has ended."""
        if any(message.retract for message in self._begun):
            self._planner.retract_all()
        for message in self._begun:
            self._io.reply(PauseReply(message.call_id))
        self._begun = []

    def end(self, message: ContinueReq) -> None:
        """Steps are planned again. A pause that has not been completed is over, too."""
        self.is_on = False
        self._timeouts.resume()
        for begun in self._begun:
            self._io.reply(PauseReply(begun.call_id))
        self._begun = []
        self._io.reply(PauseReply(message.call_id))
