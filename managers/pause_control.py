"""The pause of generation as the TokenizerManager sees it. It continues after a restart of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from ..srt.pause_messages import ContinueReq, PauseReply, PauseReq
from .calls import Calls, SchedulerLink

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of the requests: they end with what they have; they wait again without their KV; they keep their KV."""


class PauseControl:
    """Pauses and continues generation. While it is paused, new requests wait in the scheduler."""

    def __init__(
        self,
        calls: Calls,
        link: Callable[[], SchedulerLink],
        abort_all: Callable[[], None],
        on_pause: Callable[[], None],
    ) -> None:
        """`link`: the link to the scheduler; it raises EngineDead and EngineRestarting. `on_pause`: called when a pause
        has begun."""
        self.is_on = False
        self._paused_at = 0.0
        self._paused_s = 0.0
        """Length of all pauses that are over."""
        self._num_beginning = 0
        """Calls of `begin` that the scheduler has not answered."""
        self._calls = calls
        self._link = link
        self._abort_all = abort_all
        self._on_pause = on_pause

    @property
    def is_wanted(self) -> bool:
        """Generation is paused, or will be as soon as the scheduler answers."""
        return self.is_on or self._num_beginning > 0

    async def begin(self, mode: PauseMode) -> None:
        """Returns when no step runs. Raises EngineDead and EngineRestarting; then nothing is paused.

        A caller that is cancelled, as with its HTTP worker, does not stop the engine, which gets the message anyway.
        """
        await asyncio.shield(asyncio.create_task(self._begin(mode)))

    async def _begin(self, mode: PauseMode) -> None:
        link = self._link()
        if mode == "abort":
            self._abort_all()
        self._num_beginning += 1
        try:
            await self._calls.ask(link, lambda call_id: PauseReq(call_id, retract=mode == "retract"), PauseReply)
        finally:
            self._num_beginning -= 1
        if not self.is_on:
            self._paused_at = time.monotonic()
        self.is_on = True
        self._on_pause()

    async def end(self) -> None:
        """Generation continues. Does nothing without a pause. Raises EngineDead and EngineRestarting; then the pause
        continues.

        A caller that is cancelled does not stop that, as in `begin`.
        """
        await asyncio.shield(asyncio.create_task(self._end()))

    async def _end(self) -> None:
        link = self._link()
        if not self.is_wanted:
            return  # an update of the weights may have paused the engine
        await self._calls.ask(link, ContinueReq, PauseReply)
        if self.is_on:
            self._paused_s += time.monotonic() - self._paused_at
        self.is_on = False

    def now(self) -> float:
        """Seconds from any start. The time stands still while generation is paused."""
        return (self._paused_at if self.is_on else time.monotonic()) - self._paused_s

    def carry_over(self, link: SchedulerLink) -> None:
        """Pauses a new engine before it gets any request, if generation is paused."""
        if self.is_on:
            link.send(PauseReq(0, retract=False))  # 0: nobody waits for the reply
