"""Runs the prompts of a request and sends the HTTP response: one JSON body, or a stream of server-sent events.

Each API has a `ResponseFormat`, which writes the JSON. A stream sends its headers after the first output, so that a
request that cannot be served still gets an HTTP status. A later failure is one error event, then `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...managers.generation import OutputReader
from ...managers.request_registry import Prompt
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import TercetError
from ..io_struct import TextOut
from .error_handlers import envelope, internal_error
from .job import Job, Sample, check_request_size, outputs, raise_failure
from .request_log import hold_record, keeps_text, log_received
from .resumable import STREAM_HEADER
from .routing import Server, json_response
from .tenants import key_of, with_tenant

logger = logging.getLogger(__name__)

_MAX_VALUES_IN_LOOP = 10_000
"""Log probabilities and embeddings. More numbers are written in a thread, which takes up to a second."""
DONE = b"data: [DONE]\n\n"
_COMMENT_INTERVAL_S = 1.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """One server-sent event. Its data is one line, because the JSON has no line breaks."""
    return b"data: " + _encode(value) + b"\n\n"


class ResponseFormat(ABC):
    """Writes the response of one request in the JSON of one API."""

    @abstractmethod
    def begin(self, samples: Sequence[Sample]) -> None:
        """Receives the request's samples. It is called once, before the other methods."""

    @abstractmethod
    def events(self, sample: Sample, out: TextOut) -> bytes:
        """The events of one output: none, one or several. `sample.count(out)` has been called before."""

    def last_events(self) -> bytes:
        """The events between the end of the last sample and `[DONE]`."""
        return b""

    def failure(self, error: TercetError) -> bytes:
        """The last event before `[DONE]` of a stream that fails."""
        return b"data: " + envelope(error) + b"\n\n"

    @abstractmethod
    def full_response(self) -> Any:
        """The body of a response that is not streamed. The samples have collected all their outputs."""


class WholeFormat(ResponseFormat):
    """Writes the response of an endpoint that never streams."""

    _samples: Sequence[Sample] = ()

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def events(self, sample: Sample, out: TextOut) -> bytes:
        raise AssertionError("this endpoint never streams")


async def answer(
    server: Server, request: Request, prompts: Sequence[Prompt], *, response_format: ResponseFormat, name: str
) -> ASGIApp:
    """Runs the prompts and returns the response. A streamed response closes the job after its last event.

    `name`: the name for /abort_request. It is the rid of a single prompt, or the common name of several prompts.
    """
    check_request_size(prompts)
    prompts = with_tenant(request.scope, prompts)
    args = server.manager.server_args
    opened = server.manager.open(prompts, name=name)
    job = Job(server.manager, opened, request.receive)
    try:
        samples = await job.start()
        log_received(server.manager, request, prompts, samples)
        response_format.begin(samples)
        if prompts[0].options.stream:
            events = _stream(samples, response_format, Sample.collect if keeps_text(args) else Sample.count)
            parts = _whole_stream(await anext(events), events, response_format)
            return _event_stream(server, request, job, parts)
        async for sample, out in outputs(samples):
            sample.collect(out)
        if sum(_num_values(sample.collected) for sample in samples) > _MAX_VALUES_IN_LOOP:
            response = await asyncio.to_thread(_full_response, response_format)
        else:
            response = _full_response(response_format)
    except BaseException:
        job.close()
        raise
    job.close()
    return response


def _full_response(response_format: ResponseFormat) -> Response:
    return json_response(response_format.full_response())


def _num_values(out: TextOut) -> int:
    """The numbers besides token ids that an output has. Many of them would delay other streams."""
    logprobs, embedding = out.tokens.logprobs, out.tokens.embedding
    return (0 if logprobs is None else logprobs.num_values) + (0 if embedding is None else len(embedding) // 4)


async def _stream(
    samples: Sequence[Sample], response_format: ResponseFormat, take: Callable[[Sample, TextOut], None]
) -> AsyncGenerator[bytes, None]:
    """The outputs that have come together are one part of the stream, so a step costs one write.

    `take`: what becomes of an output besides its events: it is counted only, or kept for the log, too.
    """
    reader = OutputReader([sample.generation for sample in samples])
    while batch := await reader.next():
        data = b""
        try:
            for place, out in batch:
                raise_failure(samples[place], out)
                take(samples[place], out)
                if _num_values(out) > _MAX_VALUES_IN_LOOP:
                    data += await asyncio.to_thread(response_format.events, samples[place], out)
                else:
                    data += response_format.events(samples[place], out)
        except Exception:
            if data:  # what came before the failure
                yield data
            raise
        if data:
            yield data
    yield response_format.last_events() + DONE


async def _whole_stream(
    first: bytes, rest: AsyncGenerator[bytes, None], response_format: ResponseFormat
) -> AsyncGenerator[bytes, None]:
    """All events of a stream. A failure is an event, too."""
    async with contextlib.aclosing(rest):
        yield first
        try:
            async for data in rest:
                yield data
        except TercetError as error:
            yield response_format.failure(error) + DONE
        except Exception:
            logger.exception("A stream failed")
            yield response_format.failure(internal_error()) + DONE


def _event_stream(server: Server, request: Request, job: Job, parts: AsyncGenerator[bytes, None]) -> EventStream:
    """The response of a stream. With --resume-grace, its job outlives its client."""
    if server.streams is None:
        return EventStream(parts, server.manager, job.close)
    release = hold_record(request.scope)

    def on_end() -> None:
        job.close()
        release()

    stream = server.streams.open(key_of(request.scope) or "", parts, on_end)
    reader = stream.attach(0)
    job.outlive_client(reader.leave)
    return EventStream(reader.parts(), server.manager, reader.close, [(STREAM_HEADER, stream.id.encode())])


class EventStream:
    """The ASGI response that sends events as they come.

    When the client disconnects, the job ends the generations, and that ends this stream. While the engine is being
    restarted or generation is paused, comments keep the connection alive.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        manager: TokenizerManager,
        on_end: Callable[[], None],
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """`parts`: whole events. `on_end`: called at the end of the connection. `headers`: further ones."""
        self._parts = parts
        self._manager = manager
        self._on_end = on_end
        self._headers = [*_HEADERS, *headers]
        self._comments: asyncio.Task[None] | None = None
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def on_stall() -> None:
            if self._comments is None or self._comments.done():
                self._comments = asyncio.create_task(self._send_comments(send))

        self._manager.on_stall.add(on_stall)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            if self._manager.stall:
                on_stall()
            async for data in self._parts:
                self._num_sent += 1
                await send(_part(data))
            self._end_comments(on_stall)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client is gone
        finally:
            self._end_comments(on_stall)
            self._on_end()
            await self._parts.aclose()

    def _end_comments(self, on_stall: Callable[[], None]) -> None:
        self._manager.on_stall.discard(on_stall)
        if self._comments is not None:
            self._comments.cancel()

    async def _send_comments(self, send: Send) -> None:
        num_sent, stall = self._num_sent, ""
        with contextlib.suppress(OSError):  # the client is gone
            # The first step after a restart computes many prompts, and may take seconds.
            while self._manager.stall or self._num_sent == num_sent:
                stall = self._manager.stall or stall
                await send(_part(b": " + stall.encode() + b"\n\n"))
                await asyncio.sleep(_COMMENT_INTERVAL_S)


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
