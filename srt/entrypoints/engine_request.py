"""One `Engine.generate` call: what happens of it in the engine's loop, and the two streams that reach in from outside.

A call is a /generate request: its fields are read, refused and answered by the code of that endpoint.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any, TypeAlias

import msgspec
from starlette.types import Message
from tqdm import tqdm

from ...managers.tokenizer_manager import error_of
from ..errors import EngineDead, InvalidRequest
from . import native
from .engine_thread import EngineThread
from .job import Job, Prompt, Sample, outputs
from .routing import Server
from .wire import shown

Answer: TypeAlias = dict[str, Any]
"""One sample: `text`, `output_ids`, `meta_info`; in a stream of several samples `index` too."""


_PROGRESS_ABOVE = 16
"""Samples above which a progress bar is shown on a terminal."""


class EngineRequest:
    """Belongs to the engine's loop."""

    def __init__(self, server: Server, body: native.GenerateBody) -> None:
        self._server = server
        self._body = body
        self._job: Job | None = None
        self._answers: AsyncGenerator[Answer, None] | None = None

    async def whole(self, progress: bool | None) -> Answer | list[Answer]:
        """The answer in one piece. `progress`: a bar on stderr; None: on a terminal, for many samples."""
        try:
            samples, several = await self._submit()
            if progress is None:
                progress = len(samples) > _PROGRESS_ABOVE and sys.stderr.isatty()
            with tqdm(total=len(samples), unit="sample", disable=not progress) as bar:
                await asyncio.gather(*(_collect(sample, bar.update) for sample in samples))
        finally:
            await self.close()
        answers = [_answer(sample, numbered=False) for sample in samples]
        return answers if several else answers[0]

    async def open(self) -> None:
        """Starts a stream; what is wrong with the request is raised here."""
        try:
            samples, several = await self._submit()
        except BaseException:
            await self.close()
            raise
        self._answers = self._stream(samples, several)

    async def next(self) -> Answer | None:
        """The next answer of the stream, with all there is of its sample so far; None at the end."""
        assert self._answers is not None, "open() comes first"
        return await anext(self._answers, None)

    async def close(self) -> None:
        """Aborts what has not finished."""
        if self._job is not None:
            self._job.close()

    async def _submit(self) -> tuple[list[Sample], bool]:
        prompts, name, is_list = native._prompts(self._server, self._body)
        self._job = self._new_job(prompts, name)
        return await self._job.submit(prompts), is_list or prompts[0].sampling.n > 1

    def _new_job(self, prompts: list[Prompt], name: str) -> Job:
        batches = self._server.batches
        if name in batches:
            raise InvalidRequest(f"rid {shown(name)} is in use by a request that has not finished", param="rid")
        job = Job(self._server.manager, _no_client)
        if len(prompts) > 1:
            batches[name] = job
            job.on_close = functools.partial(batches.pop, name)
        return job

    async def _stream(self, samples: list[Sample], several: bool) -> AsyncGenerator[Answer, None]:
        incremental = self._server.manager.server_args.incremental_streaming_output
        try:
            async for sample, out in outputs(samples):
                if incremental:
                    sample.count(out)
                    answer = _answer(sample, numbered=several)
                    yield {**answer, "text": out.text, "output_ids": out.token_ids}
                else:
                    sample.collect(out)
                    yield _answer(sample, numbered=several)
        finally:
            await self.close()


async def _collect(sample: Sample, count: Callable[[], object]) -> None:
    async for out in sample.generation:
        error = error_of(out.finish)
        if error is not None:
            raise error
        sample.collect(out)
    count()


def _answer(sample: Sample, *, numbered: bool) -> Answer:
    meta: Any = msgspec.to_builtins(native._meta_info(sample))
    answer = {"text": sample.text, "output_ids": list(sample.output_ids), "meta_info": meta}
    if numbered:
        answer["index"] = sample.index
    return answer


async def _no_client() -> Message:
    """A Job watches its client; this one never goes away, and its requests end otherwise."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


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
