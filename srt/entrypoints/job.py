"""All that one HTTP request has started: its generations, and the watch over its client.

The client is watched from the first moment, streaming or not: when it goes away, everything that it asked for is
aborted, and the handler comes to its end by itself because its generations do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from ...managers.generation import Generation, error_of
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import InvalidRequest, RequestAborted
from ..io_struct import FinishReason, TextOut
from ..sampling_params import SamplingParams

MAX_PROMPTS = 1024
"""Prompts of one request."""
MAX_SEQUENCES = 4096
"""Prompts times samples of one request."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a request. `param`: the field that it came in, for errors."""

    content: str | Sequence[int]
    sampling: SamplingParams
    rid: str | None
    cache_salt: str = ""
    add_special_tokens: bool = True
    param: str = "prompt"


class Sample:
    """One sample of one prompt, and what has come of it so far."""

    def __init__(self, index: int, prompt_index: int, generation: Generation) -> None:
        self.index = index
        """Place in the answer: samples of the first prompt, then those of the second, ..."""
        self.prompt_index = prompt_index
        self.generation = generation
        self.prompt_tokens = len(generation.prompt_ids)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.num_retractions = 0
        self.finish: FinishReason | None = None
        self._texts: list[str] = []
        self._ids: list[int] = []

    def count(self, out: TextOut) -> None:
        """Notes the totals. An end that was decided on this side of the scheduler knows none: the last ones stay."""
        self.finish = out.finish
        if out.completion_tokens >= self.completion_tokens:
            self.completion_tokens = out.completion_tokens
            self.cached_tokens = out.cached_tokens
            self.num_retractions = out.num_retractions

    def collect(self, out: TextOut) -> None:
        """Keeps the output too, for an answer in one piece."""
        self.count(out)
        self._texts.append(out.text)
        self._ids.extend(out.token_ids)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def output_ids(self) -> list[int]:
        return self._ids

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.generation.prompt_ids)


class Job:
    """Submits the prompts of one request and aborts them when its client is gone, or at `close`."""

    def __init__(self, manager: TokenizerManager, receive: Receive) -> None:
        self._manager = manager
        self._generations: list[Generation] = []
        self._gone = False
        self._watch = asyncio.create_task(self._watch_client(receive))
        self.on_close: Callable[[], object] | None = None

    async def submit(self, prompts: Sequence[Prompt], stream: bool) -> list[Sample]:
        """Starts every prompt; raises what TokenizerManager.submit does, with `param` naming the prompt's field."""
        check_amount(prompts)
        samples: list[Sample] = []
        for place, prompt in enumerate(prompts):
            try:
                group = await self._manager.submit(
                    prompt.content,
                    prompt.sampling,
                    rid=prompt.rid,
                    cache_salt=prompt.cache_salt,
                    add_special_tokens=prompt.add_special_tokens,
                    stream=stream,
                )
            except InvalidRequest as error:
                if error.param in ("prompt", "input_ids", None):
                    error.param = prompt.param
                raise
            self._generations.extend(group)
            samples += [Sample(len(samples) + one.index, place, one) for one in group]
            if self._gone:
                raise RequestAborted("the client has gone away")
            if place + 1 < len(prompts):
                await asyncio.sleep(0)  # a long list of prompts lets streams go on in between
        return samples

    def abort(self) -> None:
        """Ends every generation; each still delivers its last output."""
        for generation in self._generations:
            generation.abort()

    def close(self) -> None:
        self._watch.cancel()
        self.abort()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.abort()


def check_amount(prompts: Sequence[Prompt]) -> None:
    """Refuses what would multiply beyond all measure."""
    if len(prompts) > MAX_PROMPTS:
        field = prompts[0].param.partition("[")[0]
        raise InvalidRequest(f"at most {MAX_PROMPTS} prompts in one request, got {len(prompts)}", param=field)
    sequences = sum(prompt.sampling.n for prompt in prompts)
    if sequences > MAX_SEQUENCES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_SEQUENCES}, got {sequences}", param="n")


async def outputs(samples: Sequence[Sample]) -> AsyncIterator[tuple[Sample, TextOut]]:
    """The outputs of all samples as they come, until every one has finished. Raises the error that a sample ends with.

    A reader that is slow gets fewer, larger outputs (see Generation); nothing piles up here.
    """
    if len(samples) == 1:
        async for out in samples[0].generation:
            _raise_failure(out)
            yield samples[0], out
        return
    arrived: asyncio.Queue[tuple[Sample, TextOut | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(sample: Sample) -> None:
        try:
            async for out in sample.generation:
                await arrived.put((sample, out))
        except Exception as error:
            await arrived.put((sample, error))

    pumps = [asyncio.create_task(pump(sample)) for sample in samples]
    try:
        unfinished = len(samples)
        while unfinished:
            sample, came = await arrived.get()
            if isinstance(came, Exception):
                raise came
            _raise_failure(came)
            unfinished -= came.finish is not None
            yield sample, came
    finally:
        for task in pumps:
            task.cancel()


def _raise_failure(out: TextOut) -> None:
    error = error_of(out.finish)
    if error is not None:
        raise error
