"""One `Engine.generate` call: what happens of it in the engine's loop, and the two streams that reach in from outside.

A call is a /generate request: its fields are read, refused and answered by the code of that endpoint.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, TypeAlias

import msgspec
from tqdm import tqdm

from ...managers.generation import Generation, error_of
from ..errors import EngineDead, InvalidRequest
from . import native
from .engine_thread import EngineThread
from .job import Prompt, Sample, outputs
from .routing import Server
from .wire import shown

Answer: TypeAlias = dict[str, Any]
"""One sample: `text`, `output_ids`, `meta_info`; in a stream of several samples `index` too."""


_PROGRESS_ABOVE = 16
"""Samples above which a progress bar is shown on a terminal."""
_MOST_IN_FLIGHT = 1024
"""Prompts of one call that the engine knows of at a time: a list of any length fits its queue."""


class EngineRequest:
    """Belongs to the engine's loop. `open_batches`: the calls with several prompts that are under way, by name."""

    def __init__(self, server: Server, open_batches: dict[str, EngineRequest], body: native.GenerateBody) -> None:
        self._server = server
        self._open_batches = open_batches
        self._body = body
        self._name = ""
        self._prompts: list[Prompt] = []
        self._several = False
        self._first_index: list[int] = []
        """Of each prompt's samples in the answer; the last entry is the number of all."""
        self._generations: list[Generation] = []
        self._is_aborted = False
        self._answers: AsyncGenerator[Answer, None] | None = None

    async def whole(self, progress: bool | None) -> Answer | list[Answer]:
        """The answer in one piece. `progress`: a bar on stderr; None: on a terminal, for many samples."""
        self._begin()
        num_samples = self._first_index[-1]
        if progress is None:
            progress = num_samples > _PROGRESS_ABOVE and sys.stderr.isatty()
        room = asyncio.Semaphore(_MOST_IN_FLIGHT)
        with tqdm(total=num_samples, unit="sample", disable=not progress) as bar:

            async def run(place: int) -> list[Sample]:
                async with room:
                    samples = await self._submit(place, stream=False)
                    for sample in samples:
                        await _collect(sample)
                        bar.update()
                    return samples

            tasks = [asyncio.create_task(run(place)) for place in range(len(self._prompts))]
            try:
                groups = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                self._end()
        answers = [_answer(sample) for group in groups for sample in group]
        return answers if self._several else answers[0]

    async def open(self) -> None:
        """Starts a stream; what is wrong with the request is raised here."""
        self._begin()
        samples: list[Sample] = []
        try:
            for place in range(len(self._prompts)):
                samples += await self._submit(place, stream=True)
        except BaseException:
            self._end()
            raise
        self._answers = self._stream(samples)

    async def next(self) -> Answer | None:
        """The next answer of the stream, with all there is of its sample so far; None at the end."""
        assert self._answers is not None, "open() comes first"
        return await anext(self._answers, None)

    async def close(self) -> None:
        """Ends the stream and aborts what has not finished."""
        self._end()

    def abort(self) -> None:
        """Ends every sample as its client would; the answer tells what there is of each."""
        self._is_aborted = True
        for generation in self._generations:
            generation.abort()

    def _begin(self) -> None:
        self._prompts, self._name, is_list = native.prompts_of(self._server, self._body)
        self._several = is_list or self._prompts[0].sampling.n > 1
        self._first_index = [*itertools.accumulate((prompt.sampling.n for prompt in self._prompts), initial=0)]
        if self._name in self._open_batches:
            raise InvalidRequest(f"rid {shown(self._name)} is in use by a request that has not finished", param="rid")
        if len(self._prompts) > 1:
            self._open_batches[self._name] = self

    def _end(self) -> None:
        self.abort()
        if self._open_batches.get(self._name) is self:
            del self._open_batches[self._name]

    async def _submit(self, place: int, *, stream: bool) -> list[Sample]:
        prompt = self._prompts[place]
        try:
            group = await self._server.manager.submit(
                prompt.content,
                prompt.sampling,
                rid=prompt.rid,
                cache_salt=prompt.cache_salt,
                stream=stream,
            )
        except InvalidRequest as error:
            if error.param in ("prompt", "input_ids", None):
                error.param = prompt.param
            raise
        self._generations += group
        if self._is_aborted:
            for generation in group:
                generation.abort()
        return [Sample(self._first_index[place] + one.index, place, one) for one in group]

    async def _stream(self, samples: list[Sample]) -> AsyncGenerator[Answer, None]:
        incremental = self._server.manager.server_args.incremental_streaming_output
        try:
            async for sample, out in outputs(samples):
                if incremental:
                    sample.count(out)
                else:
                    sample.collect(out)
                answer = _answer(sample)
                if incremental:
                    answer.update(text=out.text, output_ids=out.token_ids)
                if self._several:
                    answer["index"] = sample.index
                yield answer
        finally:
            self._end()


async def _collect(sample: Sample) -> None:
    async for out in sample.generation:
        error = error_of(out.finish)
        if error is not None:
            raise error
        sample.collect(out)


def _answer(sample: Sample) -> Answer:
    meta: Any = msgspec.to_builtins(native.meta_info(sample))
    return {"text": sample.text, "output_ids": list(sample.output_ids), "meta_info": meta}


class EngineStream(Iterator[Answer]):
    """What `Engine.generate(stream=True)` gives. It keeps the engine alive; `close`, or its end as garbage, aborts."""

    def __init__(self, engine: object, thread: EngineThread, request: EngineRequest) -> None:
        thread.wait(request.open())
        self._engine = engine
        self._thread = thread
        self._request = request
        self._finalizer = weakref.finalize(self, _close, thread, request)

    def __next__(self) -> Answer:
        if not self._finalizer.alive:
            raise StopIteration
        answer = self._thread.wait(self._request.next())
        if answer is None:
            raise StopIteration
        return answer

    def close(self) -> None:
        """Aborts what has not finished."""
        self._finalizer()


class AsyncEngineStream(AsyncIterator[Answer]):
    """What `Engine.async_generate(stream=True)` gives; belongs to the loop that iterates over it. Awaiting it starts
    the request, which otherwise the first step does."""

    def __init__(self, engine: object, thread: EngineThread, request: EngineRequest) -> None:
        self._engine = engine
        self._thread = thread
        self._request = request
        self._is_open = False
        self._finalizer = weakref.finalize(self, _close, thread, request)

    def __await__(self) -> Generator[Any, None, AsyncEngineStream]:
        return self._open().__await__()

    async def __anext__(self) -> Answer:
        if not self._finalizer.alive:
            raise StopAsyncIteration
        await self._open()
        answer = await self._thread.wait_async(self._request.next())
        if answer is None:
            raise StopAsyncIteration
        return answer

    async def aclose(self) -> None:
        """Aborts what has not finished."""
        self._finalizer()

    async def _open(self) -> AsyncEngineStream:
        if not self._is_open:
            self._is_open = True
            await self._thread.wait_async(self._request.open())
        return self


def _close(thread: EngineThread, request: EngineRequest) -> concurrent.futures.Future[None] | None:
    try:
        return thread.submit(request.close())
    except EngineDead:
        return None  # everything has ended already
