"""One HTTP request under way: its prompts, and the watch over its client.

The client is watched from the first moment, streaming or not. When it goes away, everything that it asked for ends, and
so does the handler, which reads the samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.types import Receive

from ...managers.generation import Generation, error_of, merged
from ...managers.request_registry import Prompt, Request
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import InvalidRequest, RequestAborted
from ..io_struct import FinishReason, TextOut

MAX_PROMPTS = 1024
"""Prompts of one request."""
MAX_SEQUENCES = 4096
"""Prompts times samples of one request."""


class Sample:
    """One sample of one prompt, and what has come of it so far."""

    def __init__(self, index: int, prompt_index: int, generation: Generation) -> None:
        self.index = index
        """Place in the answer: samples of the first prompt, then those of the second, ..."""
        self.prompt_index = prompt_index
        self.generation = generation
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
    def prompt_tokens(self) -> int:
        return len(self.generation.prompt_ids)

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.generation.prompt_ids)


class Job:
    """Starts the prompts of one HTTP request, and ends them when its client is gone, or at `close`."""

    def __init__(self, manager: TokenizerManager, request: Request, receive: Receive) -> None:
        self._manager = manager
        self._request = request
        self._gone = False
        self._watch = asyncio.create_task(self._watch_client(receive))

    async def start(self) -> list[Sample]:
        """Starts every prompt; raises what TokenizerManager.start does."""
        samples: list[Sample] = []
        for place, prompt in enumerate(self._request.prompts):
            if place:
                await asyncio.sleep(0)  # a long list of prompts lets streams go on in between
            await self._manager.start(prompt)
            samples += [Sample(len(samples) + one.index, place, one) for one in prompt.generations]
            if self._gone:
                raise RequestAborted("the client has disconnected")
        return samples

    def close(self) -> None:
        """Ends what has not ended: nobody reads it any more."""
        self._watch.cancel()
        self._request.close()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._request.close()


def check_amount(prompts: Sequence[Prompt]) -> None:
    """Refuses what would multiply beyond all measure."""
    if len(prompts) > MAX_PROMPTS:
        field = prompts[0].param.partition("[")[0]
        raise InvalidRequest(f"a request must have at most {MAX_PROMPTS} prompts, got {len(prompts)}", param=field)
    sequences = sum(prompt.options.sampling.n for prompt in prompts)
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
    async for place, out in merged([sample.generation for sample in samples]):
        _raise_failure(out)
        yield samples[place], out


def _raise_failure(out: TextOut) -> None:
    error = error_of(out.finish)
    if error is not None:
        raise error
