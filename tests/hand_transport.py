"""A transport and a clock that a test moves by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Transport(asyncio.Transport):
    """Keeps what is written. What is behind `unsent` the client does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unsent = 0
        self.ended = False
        self.closed = False
        self.aborted = False
        self.paused = False

    def write(self, data: Any) -> None:
        assert not self.closed and not self.ended
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]


class Clock:
    """The event loop as a protocol sees it, whose time the test tells."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.create_task = loop.create_task
        self.now = 0.0
        self._timers: list[tuple[float, asyncio.TimerHandle]] = []
        self._loop = loop

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.now + delay_s, callback, (), self._loop)
        self._timers.append((self.now + delay_s, timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Runs what falls due, in order."""
        end = self.now + seconds
        while due := [one for one in self._timers if one[0] <= end and not one[1].cancelled()]:
            first = min(due, key=lambda one: one[0])
            self._timers.remove(first)
            self.now = first[0]
            first[1]._run()
        self.now = end
