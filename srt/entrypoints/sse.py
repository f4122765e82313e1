"""Runs the prompts of a request and sends the HTTP response: one JSON body, or a stream of server-sent events.

Each API has a `ResponseFormat`, which writes the JSON. A stream sends its headers after the first output, so that a
request that cannot be served still gets an HTTP status. A later failure is one error event, then the end.
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
from ...managers.request_registry import Request as OpenRequest
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import EngineDead, RequestAborted, TercetError
from ..io_struct import AbortFinish, TextOut
from .bounded_http import CLOSE
from .error_handlers import envelope, internal_error
from .job import Job, Sample, check_request_size, outputs, raise_failure
from .limited_requests import hold_limit
from .replay import Interrupted, ReplayingReader, StreamRecorder, replay_of
from .request_log import hold_record, keeps_text, log_received
from .resumable import STREAM_HEADER, new_stream_id
from .routing import ROUTE, Server, json_response
from .tenants import owner_of, with_tenant

logger = logging.getLogger(__name__)

_MAX_VALUES_IN_LOOP = 10_000
"""Log probabilities, embeddings and hidden states. More numbers are written in a thread, which takes up to a second."""
DONE = b"data: [DONE]\n\n"
_COMMENT_INTERVAL_S = 0.5
"""How often it is looked whether something was sent since the last look."""
_QUICK_INTERVALS = 12
"""With a part in each of so many intervals, tokens flow again."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LINE_BREAKS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]
_encode = msgspec.json.Encoder().encode


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event, with its name if it has one."""
    data = _event(_encode(value))
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def _event(data: bytes) -> bytes:
    """The event with this JSON, which is one line: the encoder escapes all line breaks of ASCII. Some clients, such as
    `iter_lines` of httpx, also end lines at those of Unicode."""
    if not data.isascii():
        for char, escape in _LINE_BREAKS:
            if char[0] in data:  # a search for one byte is much faster than one for three
                data = data.replace(char, escape)
    return b"data: " + data + b"\n\n"


class ResponseFormat(ABC):
    """Writes the response of one request in the JSON of one API."""

    end = DONE
    """What ends a stream."""

    @abstractmethod
    def begin(self, samples: Sequence[Sample]) -> None:
        """Receives the request's samples. It is called once, before the other methods."""

    @abstractmethod
    def events(self, sample: Sample, out: TextOut) -> bytes:
        """The events of one output: none, one or several. `sample.count(out)` has been called before."""

    def last_events(self) -> bytes:
        """The events between the end of the last sample and `end`."""
        return b""

    def failure(self, error: TercetError) -> bytes:
        """The last event before `end` of a stream that fails."""
        return _event(envelope(error))

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


def no_result(sample: Sample) -> RequestAborted:
    """The error of a sample without a result, which its client has aborted or which was over its running time. It is
    for endpoints that have no part of a result."""
    assert isinstance(sample.finish, AbortFinish)
    return RequestAborted(f"the request has no result: {sample.finish.message}")


async def answer(
    server: Server, request: Request, prompts: Sequence[Prompt], *, response_format: ResponseFormat, name: str
) -> ASGIApp:
    """Runs the prompts and returns the response. A streamed response closes the job after its last event.

    `name`: the name for /abort_request. It is the rid of a single prompt, or the common name of several prompts.
    """
    check_request_size(prompts)
    replay = replay_of(request.scope)
    prompts = with_tenant(request.scope, prompts) if replay is None else replay.with_tenants(request.scope, prompts)
    opened = server.manager.open(prompts, name=name)
    job = Job(server.manager, opened, request.receive if replay is None else replay.receive)
    try:
        samples = await (job.start() if replay is None else job.restore(replay.packed_ids()))
        log_received(server.manager, request, prompts, samples)
        response_format.begin(samples)
        if prompts[0].options.stream:
            return await _begin_stream(server, request, job, samples, response_format, opened)
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
    logprobs, embedding, states = out.tokens.logprobs, out.tokens.embedding, out.tokens.hidden_states
    return (0 if logprobs is None else logprobs.num_values) + (len(embedding or b"") + len(states or b"")) // 4


async def _stream(
    samples: Sequence[Sample],
    response_format: ResponseFormat,
    reader: OutputReader | ReplayingReader,
    take: Callable[[Sample, TextOut], None],
    recorder: StreamRecorder | None,
    *,
    has_begun: bool,
) -> AsyncGenerator[bytes, None]:
    """The outputs that have come together are one part of the stream, so a step costs one write.

    A failure before the first part is raised. A later one is an event. `take`: what becomes of an output besides its
    events: it is counted only, or kept for the log, too. With a `recorder`, the end of the engine is no failure that
    the client is told: it raises Interrupted. `has_begun`: the client has a status already.
    """
    while True:
        data = b""
        batch: Sequence[tuple[int, TextOut]] = ()
        try:
            batch = await reader.next()
            for place, out in batch:
                raise_failure(samples[place], out)
                take(samples[place], out)
                if _num_values(out) > _MAX_VALUES_IN_LOOP:
                    data += await asyncio.to_thread(response_format.events, samples[place], out)
                else:
                    data += response_format.events(samples[place], out)
            if not batch:
                data = response_format.last_events() + response_format.end
            elif recorder is not None:
                recorder.note(samples, batch)
        except Exception as error:
            if recorder is not None and recorder.can_continue:
                if has_begun and isinstance(error, EngineDead):
                    raise Interrupted from None
                recorder.note(samples, batch)
            if not has_begun and not data:
                raise
            yield data + response_format.failure(_told(error)) + response_format.end
            return
        if data:
            yield data
            has_begun = True
        if not batch:
            return


def _told(error: Exception) -> TercetError:
    """What the client is told of an error."""
    if isinstance(error, TercetError):
        return error
    logger.error("A stream failed", exc_info=error)
    return internal_error()


async def _begin_stream(
    server: Server,
    request: Request,
    job: Job,
    samples: Sequence[Sample],
    response_format: ResponseFormat,
    opened: OpenRequest,
) -> ASGIApp:
    """The response of a stream, after its first events. With --resume-grace, its job outlives its client.

    A replay has no response: a client that continues the stream gets its events.
    """
    manager, streams, scope = server.manager, server.streams, request.scope
    replay, recorder = replay_of(scope), None
    owner = owner_of(scope)
    if server.saved is not None:
        recorder = server.saved.recorder(request, scope[ROUTE], owner, opened.prompts, replay)
    reader = OutputReader([one.generation for one in samples]) if replay is None else replay.reader(manager, samples)
    take = Sample.collect if keeps_text(manager.server_args) else Sample.count
    events = _stream(samples, response_format, reader, take, recorder, has_begun=replay is not None)
    try:
        first = await anext(events) if replay is None else b""
    except BaseException:  # it gets an HTTP status
        if recorder is not None:
            recorder.drop()
        raise
    if streams is None:
        return EventStream(events, manager, job.close, first=first)
    release_record, release_limit = hold_record(scope), hold_limit(scope)

    def on_end() -> None:
        job.close()
        release_record()
        release_limit()

    if replay is not None:
        streams.restore(replay, owner, events, on_end)
        return Response()
    stream_id = new_stream_id() if recorder is None else recorder.stream_id
    stream = streams.open(stream_id, owner, first, events, on_end)
    stream.flush()
    client = stream.attach(0)
    job.outlive_client(client.leave)
    return EventStream(client.parts(), manager, client.close, [(STREAM_HEADER, stream.id.encode())])


class EventStream:
    """The ASGI response that sends events as they come.

    When the client disconnects, the job ends the generations, and that ends this stream. While the engine is being
    restarted or generation is paused, and until tokens flow again, comments keep the connection alive: it is silent
    for at most two intervals.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        manager: TokenizerManager,
        on_end: Callable[[], None],
        headers: Sequence[tuple[bytes, bytes]] = (),
        first: bytes = b"",
    ) -> None:
        """`parts`: whole events. `on_end`: called at the end of the connection. `headers`: further ones. `first`: the
        events before `parts`."""
        self._first = first
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
            if self._first:
                await send(_part(self._first))
            async for data in self._parts:
                self._num_sent += 1
                await send(_part(data))
            self._end_comments(on_stall)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client is gone
        except Interrupted:
            await break_off(scope, receive)
        finally:
            self._end_comments(on_stall)
            self._on_end()
            await self._parts.aclose()

    def _end_comments(self, on_stall: Callable[[], None]) -> None:
        self._manager.on_stall.discard(on_stall)
        if self._comments is not None:
            self._comments.cancel()

    async def _send_comments(self, send: Send) -> None:
        stall = self._manager.stall or ""
        num_sent, num_quick = -1, 0
        with contextlib.suppress(OSError):  # the client is gone
            # The first steps after a restart compute many prompts, and may take seconds.
            while self._manager.stall or num_quick < _QUICK_INTERVALS:
                stall = self._manager.stall or stall
                if self._num_sent == num_sent or num_sent < 0:
                    num_quick = 0
                    await send(_part(b": " + stall.encode() + b"\n\n"))
                else:
                    num_quick += 1
                num_sent = self._num_sent
                await asyncio.sleep(_COMMENT_INTERVAL_S)


async def break_off(scope: Scope, receive: Receive) -> None:
    """Closes the connection in the middle of a response, so that its client knows that there is more."""
    close = scope.get(CLOSE)
    if close is not None:
        close()
        while (await receive())["type"] != "http.disconnect":
            pass


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
