"""One running HTTP request: its prompts and samples, and a task that watches for its client's disconnect.

The task starts with the request, streamed or not. When the client disconnects, all generations of the request end. The
handler that reads their outputs then ends, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.types import Receive

from ...managers.generation import Generation, OutputReader, error_of
from ...managers.request_registry import Prompt, PromptSamples, Request
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import InvalidRequest, RequestAborted
from ..io_struct import Counts, FinishReason, TextOut, joined, unpack_ids

MAX_PROMPTS = 1024
"""Maximum number of prompts in one request."""
MAX_SAMPLES = 4096
"""Maximum number of samples in one request: prompts times `n`."""


class Sample:
    """One sample of one prompt: its generation, its counts, and its collected outputs."""

    def __init__(self, index: int, prompt_index: int, prompt: PromptSamples, generation: Generation) -> None:
        self.index = index
        """Index in the response: the samples of the first prompt come first, then those of the second prompt, ..."""
        self.prompt_index = prompt_index
        self.prompt = prompt.prompt
        self.generation = generation
        self.counts = Counts(0)
        self.finish: FinishReason | None = None
        self._outs: list[TextOut] = []

    def count(self, out: TextOut) -> None:
        """Updates the finish reason and the counts."""
        self.finish = out.finish
        self.counts = out.counts

    def collect(self, out: TextOut) -> None:
        """Like `count`, and keeps the output, for a response that is not streamed."""
        self.count(out)
        self._outs.append(out)

    @property
    def collected(self) -> TextOut:
        """All collected outputs as one. There is at least one."""
        self._outs = [joined(self._outs)]
        return self._outs[0]

    @property
    def collected_text(self) -> str:
        """The text of all collected outputs; there may be none."""
        return "".join(out.text for out in self._outs)

    @property
    def prompt_tokens(self) -> int:
        return len(self.generation.prompt_ids)

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.generation.prompt_ids)


def samples_of(request: Request) -> list[Sample]:
    """All samples of a request, in the order of the response."""
    samples: list[Sample] = []
    for prompt_index, prompt in enumerate(request.prompts):
        for generation in prompt.generations:
            samples.append(Sample(len(samples), prompt_index, prompt, generation))
    return samples


class Job:
    """Starts the prompts of one HTTP request. Ends them when the client disconnects, or at `close`."""

    def __init__(self, manager: TokenizerManager, request: Request, receive: Receive) -> None:
        self._manager = manager
        self._request = request
        self._client_gone = False
        self._on_disconnect: Callable[[], None] = request.close
        self._watch = asyncio.create_task(self._watch_client(receive))

    async def start(self) -> list[Sample]:
        """Starts every prompt. Raises what `TokenizerManager.start` raises, and RequestAborted after a disconnect."""
        for prompt_index, prompt in enumerate(self._request.prompts):
            if prompt_index:
                await asyncio.sleep(0)  # other streams make progress during a long list of prompts
            await self._manager.start(prompt)
            if self._client_gone:
                raise RequestAborted("the client has disconnected")
        return samples_of(self._request)

    async def restore(self, packed_ids: Sequence[bytes]) -> list[Sample]:
        """The samples of prompts that were tokenised before (see `pack_ids`). They are not sent."""
        for prompt, ids in zip(self._request.prompts, packed_ids, strict=True):
            if callable(prompt.prompt.content):
                await prompt.prompt.content()  # it also tells how the answer begins
            prompt.prompt_ids, prompt.packed_ids = unpack_ids(ids).tolist(), ids
        return samples_of(self._request)

    def outlive_client(self, on_disconnect: Callable[[], None]) -> None:
        """From now on, a disconnect of the client calls this instead of ending the generations."""
        self._on_disconnect = on_disconnect

    def close(self) -> None:
        """Ends the unfinished generations. A second call does nothing."""
        self._watch.cancel()
        self._request.close()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self._on_disconnect()


def check_request_size(prompts: Sequence[Prompt]) -> None:
    """Raises InvalidRequest for too many samples. The handler has checked the number of prompts before."""
    num_samples = sum(prompt.options.sampling.n for prompt in prompts)
    if num_samples > MAX_SAMPLES:
        raise InvalidRequest(f"prompts times n must be at most {MAX_SAMPLES}, got {num_samples}", param="n")


async def outputs(samples: Sequence[Sample]) -> AsyncIterator[tuple[Sample, TextOut]]:
    """Yields the outputs of all samples as they come, until every sample has finished.

    Raises the error of a sample that ends with an error. A slow reader gets fewer and larger outputs (see Generation).
    """
    reader = OutputReader([sample.generation for sample in samples])
    while batch := await reader.next():
        for place, out in batch:
            raise_failure(samples[place], out)
            yield samples[place], out


def raise_failure(sample: Sample, out: TextOut) -> None:
    """Raises the error that an output ends with, if it does. An error of a grammar names the field of the body."""
    error = error_of(out.finish)
    if error is None:
        return
    grammar = sample.prompt.options.sampling.grammar
    if grammar is not None and error.param == grammar.kind:
        error.param = sample.prompt.grammar_param or grammar.kind
    raise error
