"""One sample on its way: what a client holds while the engine works for it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

from ..srt.errors import BY_TYPE, TercetError
from ..srt.io_struct import AbortFinish, FinishReason, TextOut


class Generation:
    """One sample of one prompt on its way: iterate over its outputs, or `result()` for all at once.

    Outputs that arrive while nobody looks are merged, so a slow reader sees fewer, larger ones and loses nothing.
    """

    def __init__(self, rid: str, index: int, prompt_ids: Sequence[int], on_abort: Callable[[Generation], None]) -> None:
        """`on_abort`: called at most once, before the end, when nobody wants the rest."""
        self.rid = rid
        """The client's name for the request; the samples of one prompt share it."""
        self.index = index
        """Which of the `n` samples this is."""
        self.prompt_ids = prompt_ids
        self.created = time.monotonic()
        self.first_token_s: float | None = None
        """Seconds from submission to the first token."""
        self.finished_s: float | None = None
        self.key = uuid.uuid4().hex
        """The request's name behind the TokenizerManager, unlike any other."""
        self._on_abort = on_abort
        self._waiting: list[TextOut] = []
        self._arrived = asyncio.Event()
        self._done = False

    async def __aiter__(self) -> AsyncIterator[TextOut]:
        """Yields each increment; the last one has `finish` set. Closing the iterator early aborts the request."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                if not self._waiting:
                    continue
                out = _joined(self._waiting)
                self._waiting = []
                yield out
                if out.finish is not None:
                    return
        finally:
            self.abort()

    async def result(self) -> TextOut:
        """Everything, once it is finished. Cancelling it aborts the request."""
        return _joined([out async for out in self])

    def abort(self) -> None:
        """Ends the request wherever it is; harmless when it has ended."""
        if not self._done:
            self._on_abort(self)
            self._end(AbortFinish("aborted by the client"))

    def push(self, out: TextOut) -> None:
        """The TokenizerManager's side: more of it has come."""
        now = time.monotonic()
        if self.first_token_s is None and out.completion_tokens:
            self.first_token_s = now - self.created
        if out.finish is not None:
            self._done = True
            self.finished_s = now - self.created
        self._waiting.append(out)
        self._arrived.set()

    def fail(self, error: TercetError) -> None:
        """The request ends with this error; what it has said stays said."""
        self._end(AbortFinish(error.message, error.status, type(error).__name__))

    def _end(self, finish: AbortFinish) -> None:
        self.push(TextOut(self.key, "", [], finish, len(self.prompt_ids), 0, 0, 0))


def _joined(outs: Sequence[TextOut]) -> TextOut:
    """Increments in a row, as one."""
    last = outs[-1]
    if len(outs) == 1:
        return last
    # An end that was decided on this side of the scheduler knows no counts: those before it stand.
    counts = max(outs, key=lambda out: out.completion_tokens)
    return TextOut(
        last.rid,
        "".join(out.text for out in outs),
        [token for out in outs for token in out.token_ids],
        last.finish,
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.cached_tokens,
        counts.num_retractions,
    )


def error_of(finish: FinishReason | None) -> TercetError | None:
    """The error that a finish stands for; None for a regular end and for an abort that the client asked for."""
    if not isinstance(finish, AbortFinish) or finish.status_code is None:
        return None
    return BY_TYPE.get(finish.err_type or "", TercetError)(finish.message)
