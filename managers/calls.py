"""Calls to another process, each with one reply, such as a call for the state of the scheduler."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from ..srt.errors import TercetError
from ..srt.io_struct import SchedulerState, ToScheduler

R = TypeVar("R", bound="Answer")
Q = TypeVar("Q")
Q_contra = TypeVar("Q_contra", contravariant=True)


class KnownState(NamedTuple):
    """The last known state of the scheduler. `age_s`: its age in seconds; 0 for a fresh answer."""

    state: SchedulerState
    age_s: float


class SchedulerLink(Protocol):
    """The link to the scheduler: an `ipc.Sender`, or a test's fake."""

    def send(self, message: ToScheduler) -> None: ...


class Link(Protocol[Q_contra]):
    """The way to a process that answers questions."""

    def send(self, message: Q_contra, /) -> None: ...


class Answer(Protocol):
    """A message with the `call_id` of its question."""

    @property
    def call_id(self) -> int: ...


class Calls:
    """The calls that wait for their replies. It belongs to one event loop."""

    def __init__(self, ids: Iterator[int] | None = None) -> None:
        """`ids`: shared with other Calls that get the same replies."""
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = itertools.count(1) if ids is None else ids

    async def ask(self, link: Link[Q], question: Callable[[int], Q], reply_type: type[R]) -> R:
        """Sends `question(call_id)`, and waits for the reply. Raises the error that `fail` is called with."""
        call_id = next(self._ids)
        call = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            link.send(question(call_id))
            reply = await call
        finally:
            del self._waiting[call_id]
        assert isinstance(reply, reply_type)
        return reply

    def on_reply(self, reply: Answer) -> None:
        """Hands a reply to its call. A reply that comes too late is dropped."""
        call = self._waiting.get(reply.call_id)
        if call is not None and not call.done():
            call.set_result(reply)

    def fail(self, error: TercetError) -> None:
        """Ends every waiting call with an error: no reply will come."""
        for call in self._waiting.values():
            if not call.done():
                call.set_exception(error)
