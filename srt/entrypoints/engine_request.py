"""One `Engine.generate` call: the request in the engine's event loop, and the streams that the caller iterates over.

A call is a /generate request. The code of that endpoint checks its fields and writes its answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, TypeAlias

import msgspec

from ...managers.generation import Generation
from ...managers.request_registry import PromptSamples, Request
from ..errors import EngineDead
from ..io_struct import TextOut
from ..server_args import ServerArgs
from . import native
from .engine_thread import EngineThread
from .job import Sample, outputs, samples_of
from .native_protocol import GenerateBody
from .progress import progress_bar
from .request_names import RequestNames
from .routing import Server

Answer: TypeAlias = dict[str, Any]
"""One sample: `text`, `output_ids` and `meta_info`. A stream of several samples adds `index`."""

_MAX_IN_FLIGHT = 1024
_RETRY_S = 0.05


def make_sample_limit(server_args: ServerArgs) -> asyncio.Semaphore:
    """A semaphore that limits how many samples of an Engine are in its scheduler at a time.

    All of them may be waiting there, so `max_queued_requests` bounds them.
    """
    return asyncio.Semaphore(min(_MAX_IN_FLIGHT, server_args.max_queued_requests))


class EngineRequest:
    """One `generate` call in the engine's event loop.

    `sample_limit`: the semaphore of `make_sample_limit`, which all calls of an Engine share. Samples are sent to the
    scheduler as the semaphore admits them. So a list of prompts may have any length, and a call never fails because
    other calls fill the queue.
    """

    def __init__(self, server: Server, sample_limit: asyncio.Semaphore, body: GenerateBody) -> None:
        self._manager = server.manager
        self._server = server
        self._sample_limit = sample_limit
        self._body = body
        self._request: Request | None = None
        self._samples: list[Sample] = []
        self._several = False
        """The answer is a list (`native.prompts_of`)."""
        self._feeder: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        """The error of a prompt that could not be started."""
        self._answers: AsyncGenerator[Answer, None] | None = None
        self._is_open = False
        self._reading = asyncio.Lock()

    async def run(self, progress: bool | None) -> Answer | list[Answer]:
        """Runs the request to its end and returns the complete answer.

        `progress`: whether stderr shows a progress bar. None: a terminal does, for more than 16 samples.
        """
        self._begin()
        self._feeder = asyncio.create_task(self._feed())
        with progress_bar(len(self._samples), progress) as bar:
            try:
                async for sample, out in self._outputs():
                    sample.collect(out)
                    if out.finish is not None:
                        bar.update()
            finally:
                self._end()
        answers = [self._answer(sample, sample.collected) for sample in self._samples]
        return answers if self._several else answers[0]

    async def open(self) -> None:
        """Starts a stream. Raises InvalidRequest for an invalid request. A second call does nothing."""
        async with self._reading:
            await self._open()

    async def next(self) -> Answer | None:
        """The next answer of the stream; None at the end and after an error. Opens the stream if necessary.

        The text and token ids of an answer are cumulative, unless `incremental_streaming_output` is set.
        """
        async with self._reading:
            await self._open()
            return None if self._answers is None else await anext(self._answers, None)

    async def close(self) -> None:
        """Ends the stream and every unfinished sample."""
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
        prompts, name, self._several = native.prompts_of(self._server, self._body, RequestNames())
        self._request = self._manager.open(prompts, name=name)
        self._samples = samples_of(self._request)

    def _end(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
        if self._request is not None:
            self._request.close()

    async def _feed(self) -> None:
        """Sends the samples to the scheduler as `sample_limit` admits them. An error ends the request."""
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
        is_acquired = False
        if not generation.is_over:
            with prompt.unless_over():
                is_acquired = await self._sample_limit.acquire()
        if not is_acquired:
            return
        if generation.is_over:
            self._sample_limit.release()
            return
        generation.on_end = self._sample_limit.release
        generation.on_queue_full = functools.partial(self._send_later, prompt, generation)
        self._manager.send(prompt, generation)

    def _send_later(self, prompt: PromptSamples, generation: Generation) -> None:
        """Sends the sample again after a moment: the queue may still hold samples that have just been closed here."""
        asyncio.get_running_loop().call_later(_RETRY_S, self._manager.send, prompt, generation)

    async def _outputs(self) -> AsyncIterator[tuple[Sample, TextOut]]:
        """Like `job.outputs`, but raises the feeder's error, too."""
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
                    out = sample.collected
                answer = self._answer(sample, out)
                if self._several:
                    answer["index"] = sample.index
                yield answer
        finally:
            self._end()

    def _answer(self, sample: Sample, out: TextOut) -> Answer:
        states = native.hidden_lists(self._server, sample, out, lambda vector: vector)
        lists = {**native.logprob_lists(self._server, sample, out), **states}
        meta: Any = msgspec.to_builtins(native.meta_info(sample, lists))
        return {"text": out.text, "output_ids": list(out.token_ids), "meta_info": meta}


class EngineStream(Iterator[Answer]):
    """The iterator that `Engine.generate(stream=True)` returns. It keeps the engine alive.

    `close`, or garbage collection of the iterator, aborts the request.
    """

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
        """Aborts the unfinished samples."""
        self._finalizer()


class AsyncEngineStream(AsyncIterator[Answer]):
    """The asynchronous iterator that `Engine.async_generate(stream=True)` returns.

    It belongs to the event loop that iterates over it. The request starts when the iterator is awaited, or at its first
    step.
    """

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
        """Aborts the unfinished samples."""
        self._finalizer()

    async def _open(self) -> AsyncEngineStream:
        await self._thread.wait_async(self._request.open())
        return self


def _close(thread: EngineThread, request: EngineRequest) -> concurrent.futures.Future[None] | None:
    try:
        return thread.submit(request.close())
    except EngineDead:
        return None  # the engine is dead, so every sample has ended already
