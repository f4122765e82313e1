"""The samples of one HTTP worker, in the process that has the engine.

The worker has checked and tokenised them. The TokenizerManager of this process owns them like its own: it sends them to
the scheduler, resumes them in a restarted engine, and finds the one that crashes the engine. It sends their outputs to
the worker, those of one turn of the event loop in one message.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable

from ..srt.errors import TercetError
from ..srt.io_struct import AbortFinish, BatchTextOut, Counts, TextOut, TokenOut
from ..srt.worker_messages import Recoveries, SampleReq
from .generation import Generation
from .tokenizer_manager import TokenizerManager


class WorkerRelay:
    """Belongs to the event loop of its manager. `send`: sends outputs to the worker."""

    def __init__(self, manager: TokenizerManager, send: Callable[[BatchTextOut | Recoveries], None]) -> None:
        self._manager = manager
        self._send = send
        self._live: dict[str, Generation] = {}
        self._ready: list[Generation] = []
        self._is_closed = False

    def __len__(self) -> int:
        """The number of samples that have not ended."""
        return len(self._live)

    def generate(self, sample: SampleReq) -> None:
        """Takes a sample. It is answered, also if it is refused."""
        generation = self._manager.adopt(sample.request, sample.name, sample.index)
        if not generation.is_over:
            self._live[generation.key] = generation
            generation.on_end = functools.partial(self._live.pop, generation.key)
        generation.notify(functools.partial(self._on_output, generation))

    def abort(self, key: str) -> None:
        """Does nothing if the sample has ended."""
        generation = self._live.get(key)
        if generation is not None:
            generation.abort()

    def fail(self, keys: Iterable[str], reason: str) -> None:
        """Ends the samples that a broken message names, also those that have never arrived."""
        finish = AbortFinish.of(TercetError(reason))
        for key in keys:
            generation = self._live.get(key)
            if generation is not None:
                generation.fail(TercetError(reason))
            else:
                end = TokenOut(rid=key, token_ids=[], finish=finish, counts=Counts(0))
                self._send(BatchTextOut([TextOut(tokens=end, text="")]))

    def flush(self) -> None:
        """Sends the outputs that have come since the last call."""
        ready, self._ready = self._ready, []
        if not ready or self._is_closed:
            return
        recovered = {generation.key: generation.num_recoveries for generation in ready if generation.num_recoveries}
        if recovered:
            self._send(Recoveries(recovered))
        self._send(BatchTextOut([generation.take() for generation in ready]))

    def close(self) -> int:
        """The worker has died, so its samples are no longer read. Returns the number of those that had not ended."""
        self._is_closed = True
        live = list(self._live.values())
        for generation in live:
            generation.close()
        return len(live)

    def _on_output(self, generation: Generation) -> None:
        if not self._ready:
            asyncio.get_running_loop().call_soon(self.flush)
        self._ready.append(generation)
