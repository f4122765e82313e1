"""One sample on its way: what a client holds while the engine works for it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from ..srt.errors import BY_TYPE, QueueFull, TercetError
from ..srt.io_struct import AbortFinish, Counts, FinishReason, TextOut

ABORT_TIMEOUT_S = 30.0
"""How long an aborted sample waits for its last output. A step of the model may take seconds on a CPU."""


class GenerationOwner(Protocol):
    """The prompt that a sample belongs to."""

    rid: str
    prompt_ids: Sequence[int]

    def stop(self, generation: Generation) -> None:
        """The engine shall not go on with this sample."""

    def on_end(self, generation: Generation) -> None:
        """The sample has had its last output."""


class Generation:
    """One sample of one prompt: iterate over its outputs, or `result()` for all at once.

    It exists from the moment its request is accepted, before the prompt is tokenised, until its last output. Outputs
    that arrive while nobody looks are merged, so a slow reader sees fewer, larger ones and loses nothing.
    """

    def __init__(self, owner: GenerationOwner, index: int, key: str) -> None:
        self.index = index
        """Which of the `n` samples of its prompt this is."""
        self.key = key
        """The sample's name behind the TokenizerManager, unlike any other."""
        self.first_token_s: float | None = None
        """Seconds from submission to the first token."""
        self.finished_s: float | None = None
        """Seconds from submission to the last output; None before."""
        self.on_end: Callable[[], object] | None = None
        """Called once, when the sample ends."""
        self.on_queue_full: Callable[[], object] | None = None
        """Called in place of an end by QueueFull; whoever sets it sends the sample again. None: that is the end."""
        self.is_over = False
        self._owner = owner
        self._submitted = time.monotonic()
        self._is_sent = False
        self._is_stopped = False
        self._timeout: asyncio.TimerHandle | None = None
        self._waiting: list[TextOut] = []
        self._notify: Callable[[], object] = _nobody

    @property
    def rid(self) -> str:
        """The client's name for the prompt; its samples share it."""
        return self._owner.rid

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Empty until the prompt has been tokenised."""
        return self._owner.prompt_ids

    async def __aiter__(self) -> AsyncIterator[TextOut]:
        """Yields each increment; the last one has `finish` set. Closing the iterator early closes the sample."""
        arrived = asyncio.Event()
        self.notify(arrived.set)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                out = self.take()
                yield out
                if out.finish is not None:
                    return
        finally:
            self.close()

    async def result(self) -> TextOut:
        """Everything, once it is finished. Cancelling it closes the sample."""
        return _joined([out async for out in self])

    def notify(self, reader: Callable[[], object]) -> None:
        """Calls `reader` whenever there is something to `take` after there was nothing."""
        self._notify = reader
        if self._waiting:
            reader()

    def take(self) -> TextOut:
        """All that has arrived since the last call, as one output."""
        out = _joined(self._waiting)
        self._waiting = []
        return out

    def abort(self) -> None:
        """Ask the engine to stop. The last output has all tokens so far, and follows at once or after the current step.
        Does nothing if the sample has ended."""
        if self.is_over or self._is_stopped:
            return
        if not self._is_sent:
            self.close()
            return
        self._stop()
        self._timeout = asyncio.get_running_loop().call_later(ABORT_TIMEOUT_S, self.close)

    def close(self) -> None:
        """End the sample without waiting for the engine. Does nothing if it has ended."""
        if self.is_over:
            return
        if self._is_sent and not self._is_stopped:
            self._stop()
        self._end(AbortFinish("aborted by the client"))

    def fail(self, error: TercetError) -> None:
        """Ends the sample with this error; the outputs before it stay."""
        if not self.is_over:
            self._end(AbortFinish.of(error))

    def mark_sent(self) -> None:
        """The TokenizerManager's side: the engine has the sample now."""
        assert not self._is_sent
        self._submitted = time.monotonic()
        self._is_sent = True

    def push(self, out: TextOut) -> None:
        """The TokenizerManager's side: an output has come."""
        if self.on_queue_full is not None and isinstance(error_of(out.finish), QueueFull):
            self._is_sent = False
            if self._is_stopped:
                self.close()
            else:
                self.on_queue_full()
            return
        now = time.monotonic()
        if self.first_token_s is None and out.counts.completion_tokens:
            self.first_token_s = now - self._submitted
        self._waiting.append(out)
        if out.finish is not None:
            self.finished_s = now - self._submitted
            self._on_last_output(out.finish)
        if len(self._waiting) == 1:
            self._notify()

    def _on_last_output(self, finish: FinishReason) -> None:
        self.is_over = True
        if self._timeout is not None:
            self._timeout.cancel()
        if error_of(finish) is not None and self._is_sent and not self._is_stopped:
            self._stop()  # it may have failed in the detokenizer, while the scheduler still works on it
        self._owner.on_end(self)
        if self.on_end is not None:
            self.on_end()

    def _stop(self) -> None:
        self._is_stopped = True
        self._owner.stop(self)

    def _end(self, finish: AbortFinish) -> None:
        counts = Counts(len(self.prompt_ids))
        self.push(TextOut(rid=self.key, text="", token_ids=[], finish=finish, counts=counts))


def _nobody() -> None:
    """Reads no output."""


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, TextOut]]:
    """The outputs of several samples as they come, each with its place in the sequence, until all have ended.

    A reader that is slow gets fewer, larger outputs; nothing piles up here.
    """
    arrived = asyncio.Event()
    ready: deque[int] = deque()

    def on_output(place: int) -> None:
        ready.append(place)
        arrived.set()

    for place, generation in enumerate(generations):
        generation.notify(functools.partial(on_output, place))
    num_unfinished = len(generations)
    while num_unfinished:
        await arrived.wait()
        arrived.clear()
        while ready:
            place = ready.popleft()
            out = generations[place].take()
            num_unfinished -= out.finish is not None
            yield place, out


def _joined(outs: Sequence[TextOut]) -> TextOut:
    """Increments in a row, as one."""
    last = outs[-1]
    if len(outs) == 1:
        return last
    # An end that was decided on this side of the scheduler knows no counts: those before it stand.
    counts = max((out.counts for out in outs), key=lambda counts: counts.completion_tokens)
    return TextOut(
        rid=last.rid,
        text="".join(out.text for out in outs),
        token_ids=[token for out in outs for token in out.token_ids],
        finish=last.finish,
        counts=counts,
    )


def error_of(finish: FinishReason | None) -> TercetError | None:
    """The error that a finish stands for; None for a regular end and for an abort that the client asked for."""
    if not isinstance(finish, AbortFinish) or finish.status_code is None:
        return None
    return BY_TYPE.get(finish.err_type or "", TercetError)(finish.message)
