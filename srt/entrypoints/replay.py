"""The streams of `--resume-file`: what is recorded while a stream runs, and how another server replays it.

A handler writes the events of a stream from its outputs alone. So a server that gives the recorded outputs to the same
handler gets the same events with the same numbers. Then the samples go on in its engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Message, Scope

from ...managers.generation import Generation, OutputReader, Timings
from ...managers.request_registry import Prompt, PromptSamples
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import StreamChanged
from ..io_struct import TextOut
from .job import Sample
from .request_names import RequestNames
from .stream_journal import SavedOut, SavedPrompt, SavedRequest, SavedStream, StreamJournal
from .tenants import key_of

_REPLAY = "tercet.replay"
_YIELD_AFTER = 32
"""Batches that are replayed before other streams make progress."""


class Interrupted(Exception):
    """The stream has stopped in the middle. Another server will continue it."""


class StreamRecorder:
    """Tells the journal of the batches of one stream."""

    def __init__(
        self,
        journal: StreamJournal,
        stream_id: str,
        make_request: Callable[[list[SavedPrompt], str], SavedRequest],
        prompts: Sequence[PromptSamples],
        num_known: int | None = None,
        weight_version: str = "",
    ) -> None:
        """`make_request`: called with the first batch and the weights that have computed it. `num_known`: batches that
        the journal has already, and `weight_version` their weights; None: it does not have the request either."""
        self.stream_id = stream_id
        self._weight_version = weight_version
        self._journal = journal
        self._make_request = make_request
        self._prompts = prompts
        self._is_begun = num_known is not None
        """The journal has the request."""
        self._num_known = num_known or 0
        self._num_batches = 0
        self._is_on = True

    @property
    def can_continue(self) -> bool:
        """Whether another server could continue the stream."""
        return self._is_on and self._is_begun

    def note(self, samples: Sequence[Sample], batch: Sequence[tuple[int, TextOut]]) -> None:
        """These outputs have become events, which are not sent yet."""
        self._num_batches += 1
        if self._num_batches <= self._num_known or not self._is_on:
            return
        versions = {samples[place].generation.weight_version for place, _ in batch}
        if not self._is_begun:
            self._weight_version = min(versions)
            self._is_on = self._is_begun = self._begin()
        if versions != {self._weight_version}:  # no other server has both the old and the new weights
            self._journal.forget(self.stream_id)
            self._is_on = False
        if self._is_on:
            outs = [_saved(place, out, samples[place].generation) for place, out in batch]
            self._is_on = self._journal.note(self.stream_id, self._num_batches, outs)

    def drop(self) -> None:
        """The stream has failed before its client knew of it."""
        if self.can_continue:
            self._journal.forget(self.stream_id)

    def _begin(self) -> bool:
        prompts = []
        for prompt in self._prompts:
            request = prompt.generations[0].request
            if request is None:
                return False  # it was aborted before it was sent
            prompts.append(SavedPrompt(request.input_ids, request.options))
        return self._journal.begin(self.stream_id, self._make_request(prompts, self._weight_version))


def _saved(place: int, out: TextOut, generation: Generation) -> SavedOut:
    if out.finish is None:
        return SavedOut(place, out, generation.num_recoveries, generation.first_token_s)
    timings = None if generation.timings is None else tuple(generation.timings)
    return SavedOut(place, out, generation.num_recoveries, generation.first_token_s, generation.finished_s, timings)


class Replay:
    """One stream of a server that has ended, while its request is handled again."""

    def __init__(self, stream_id: str, saved: SavedStream) -> None:
        self.stream_id = stream_id
        self.saved = saved
        self.is_replayed = asyncio.Event()
        """All recorded events have been made, and the stream is not over. One that is over ends without its client, who
        may have its last events already: they have no record of their own."""
        self.is_wanted = asyncio.Event()
        """A client reads the stream. Before, its samples do not run."""

    def names(self) -> RequestNames:
        return RequestNames(self.saved.request.nonce, self.saved.request.began_s)

    async def receive(self) -> Message:
        """The connection of the request, whose end no longer matters."""
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never

    def packed_ids(self) -> list[bytes]:
        """The token ids of its prompts."""
        return [prompt.ids for prompt in self.saved.request.prompts]

    def with_tenants(self, scope: Scope, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts with the tenants that began the stream. `scope`: of the request that continues it.

        With several API keys, the key is the tenant. It may have had another number at the server before.
        """
        key = key_of(scope)
        tenants = [saved.options.tenant if key is None else key for saved in self.saved.request.prompts]
        return [
            dataclasses.replace(prompt, options=msgspec.structs.replace(prompt.options, tenant=tenant))
            for prompt, tenant in zip(prompts, tenants, strict=True)
        ]

    def reader(self, manager: TokenizerManager, samples: Sequence[Sample]) -> ReplayingReader:
        return ReplayingReader(self, manager, samples)


class ReplayingReader:
    """An OutputReader that begins with the recorded outputs. After them, it sends the samples to the engine."""

    def __init__(self, replay: Replay, manager: TokenizerManager, samples: Sequence[Sample]) -> None:
        self._replay = replay
        self._manager = manager
        self._samples = samples
        self._reader = OutputReader([sample.generation for sample in samples])
        self._num_replayed = 0

    async def next(self) -> list[tuple[int, TextOut]]:
        batches = self._replay.saved.batches
        while self._num_replayed < len(batches):
            batch = batches[self._num_replayed]
            self._num_replayed += 1
            if not self._num_replayed % _YIELD_AFTER:
                await asyncio.sleep(0)
            if sum(self._restore(saved) for saved in batch):
                return await self._reader.next()
        if not self._replay.is_replayed.is_set():
            batches.clear()  # they take more memory than their records
            self._num_replayed = 0
            if any(not sample.generation.is_over for sample in self._samples):
                self._replay.is_replayed.set()
                await self._replay.is_wanted.wait()
                self._send()
        return await self._reader.next()

    def _restore(self, saved: SavedOut) -> bool:
        """Returns False if the sample has ended here: it was aborted meanwhile, or the engine has died for good."""
        generation = self._samples[saved.place].generation
        if generation.is_over:
            return False
        generation.restore(saved.out, saved.num_recoveries, saved.first_token_s)
        if saved.out.finish is not None:
            generation.finished_s = saved.finished_s
            generation.timings = None if saved.timings is None else Timings(*saved.timings)
        return True

    def _send(self) -> None:
        request = self._replay.saved.request
        unfinished = [sample.generation for sample in self._samples if not sample.generation.is_over]
        if any(generation.weight_version != request.weight_version for generation in unfinished):
            raise StreamChanged("the weights were updated before the stream could continue")
        age_s = max(time.time() - request.began_s, 0.0)
        for sample in self._samples:
            prompt = request.prompts[sample.prompt_index]
            options = msgspec.structs.replace(prompt.options, tenant=sample.prompt.options.tenant)
            self._manager.restore(sample.generation, prompt.ids, options, age_s)


def replay_of(scope: Scope) -> Replay | None:
    """The replay that a request belongs to, if it is one."""
    replay: Replay | None = scope.get(_REPLAY)
    return replay


def set_replay(scope: Scope, replay: Replay) -> None:
    scope[_REPLAY] = replay
