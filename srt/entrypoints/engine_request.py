"""One `Engine.generate` call: what happens of it in the engine's loop, and the two streams that reach in from outside.

A call is a /generate request: its fields are read, refused and answered by the code of that endpoint.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, TypeAlias

import msgspec
from tqdm import tqdm

from ...managers.generation import Generation
from ...managers.request_registry import PromptSamples, Request
from ..errors import EngineDead
from ..io_struct import TextOut
from ..server_args import ServerArgs
from . import native
from .engine_thread import EngineThread
from .job import Sample, outputs
from .routing import Server

Answer: TypeAlias = dict[str, Any]
"""One sample: `text`, `output_ids`, `meta_info`; in a stream of several samples `index` too."""


_PROGRESS_ABOVE = 16
"""Samples above which a progress bar is shown on a terminal."""
_MAX_IN_FLIGHT = 1024
_RETRY_S = 0.05


def make_room(server_args: ServerArgs) -> asyncio.Semaphore:
    """Counts the samples of an Engine that its scheduler may know of at a time: all of them may have to wait there."""
    return asyncio.Semaphore(min(_MAX_IN_FLIGHT, server_args.max_queued_requests))


class EngineRequest:
    """Belongs to the engine's loop. `room`: what `make_room` gives; all calls of an Engine share it.

    The scheduler gets the samples one by one, as there is room. So a list may have any length, and no call fails
    because others fill the queue.
    """

    def __init__(self, server: Server, room: asyncio.Semaphore, body: native.GenerateBody) -> None:
        self._manager = server.manager
        self._server = server
        self._room = room
        self._body = body
        self._request: Request | None = None
        self._samples: list[Sample] = []
        self._several = False
        self._feeder: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        """Why a prompt could not be started."""
        self._answers: AsyncGenerator[Answer, None] | None = None
        self._is_open = False
        self._reading = asyncio.Lock()

    async def whole(self, progress: bool | None) -> Answer | list[Answer]:
        """The answer in one piece. `progress`: a bar on stderr; None: on a terminal, for many samples."""
        self._begin()
        self._feeder = asyncio.create_task(self._feed())
        if progress is None:
            progress = len(self._samples) > _PROGRESS_ABOVE and sys.stderr.isatty()
        with tqdm(total=len(self._samples), unit="sample", disable=not progress) as bar:
            try:
                async for sample, out in self._outputs():
                    sample.collect(out)
                    if out.finish is not None:
                        bar.update()
            finally:
                self._end()
        answers = [_answer(sample) for sample in self._samples]
        return answers if self._several else answers[0]

    async def open(self) -> None:
        """Starts a stream; what is wrong with the request is raised here. A second call does nothing."""
        async with self._reading:
            await self._open()

    async def next(self) -> Answer | None:
        """The next answer of the stream, with all there is of its sample so far; None at the end, and after an error.
        Opens the stream when nobody has."""
        async with self._reading:
            await self._open()
            return None if self._answers is None else await anext(self._answers, None)

    async def close(self) -> None:
        """Ends the stream, and every sample that has not ended."""
        self._end()

    async def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._begin()
        assert self._request is not None
        try:
            for prompt in self._request.prompts:
                await self._manager.prepare(prompt)
        except BaseException:
            self._end()
            raise
        self._feeder = asyncio.create_task(self._feed())
        self._answers = self._stream()

    def _begin(self) -> None:
        prompts, name, is_list = native.prompts_of(self._server, self._body)
        self._several = is_list or prompts[0].options.sampling.n > 1
        self._request = self._manager.open(prompts, name=name)
        for place, prompt in enumerate(self._request.prompts):
            first = len(self._samples)
            self._samples += [Sample(first + one.index, place, one) for one in prompt.generations]

    def _end(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
        if self._request is not None:
            self._request.close()

    async def _feed(self) -> None:
        """Gives the samples to the scheduler as there is room for them. An error ends the request."""
        assert self._request is not None
        try:
            for prompt in self._request.prompts:
                await self._manager.prepare(prompt)
                for generation in prompt.generations:
                    await self._send(prompt, generation)
        except Exception as error:
            self._error = error
            self._request.close()

    async def _send(self, prompt: PromptSamples, generation: Generation) -> None:
        has_room = False
        if not generation.is_over:
            with prompt.unless_over():
                has_room = await self._room.acquire()
        if not has_room:
            return
        if generation.is_over:
            self._room.release()
            return
        generation.on_end = self._room.release
        generation.on_queue_full = functools.partial(self._send_later, prompt, generation)
        self._manager.send(prompt, generation)

    def _send_later(self, prompt: PromptSamples, generation: Generation) -> None:
        """The queue may still hold samples that were closed here a moment ago."""
        asyncio.get_running_loop().call_later(_RETRY_S, self._manager.send, prompt, generation)

    async def _outputs(self) -> AsyncIterator[tuple[Sample, TextOut]]:
        """What job.outputs gives; raises the feeder's error too."""
        async for sample, out in outputs(self._samples):
            if self._error is not None:
                raise self._error
            yield sample, out

    async def _stream(self) -> AsyncGenerator[Answer, None]:
        incremental = self._manager.server_args.incremental_streaming_output
        try:
            async for sample, out in self._outputs():
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
        self._finalizer = weakref.finalize(self, _close, thread, request)

    def __await__(self) -> Generator[Any, None, AsyncEngineStream]:
        return self._open().__await__()

    async def __anext__(self) -> Answer:
        if not self._finalizer.alive:
            raise StopAsyncIteration
        answer = await self._thread.wait_async(self._request.next())
        if answer is None:
            raise StopAsyncIteration
        return answer

    async def aclose(self) -> None:
        """Aborts what has not finished."""
        self._finalizer()

    async def _open(self) -> AsyncEngineStream:
        await self._thread.wait_async(self._request.open())
        return self


def _close(thread: EngineThread, request: EngineRequest) -> concurrent.futures.Future[None] | None:
    try:
        return thread.submit(request.close())
    except EngineDead:
        return None  # everything has ended already
