"""Runs the prompts of a request and sends the HTTP response: one JSON body, or a stream of server-sent events.

Each API has a `ResponseFormat`, which writes the JSON. A stream sends its headers after the first output, so that a
request that cannot be served still gets an HTTP status. A later failure is one error event, then `[DONE]`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...managers.request_registry import Prompt
from ..errors import TercetError
from ..io_struct import TextOut
from .error_handlers import envelope, internal_error
from .job import Job, Sample, check_request_size, outputs
from .routing import Server, json_response

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
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

    @abstractmethod
    def full_response(self) -> Any:
        """The body of a response that is not streamed. The samples have collected all their outputs."""


async def answer(
    server: Server, request: Request, prompts: Sequence[Prompt], *, response_format: ResponseFormat, name: str
) -> ASGIApp:
    """Runs the prompts and returns the response. A streamed response closes the job after its last event.

    `name`: the name for /abort_request. It is the rid of a single prompt, or the common name of several prompts.
    """
    check_request_size(prompts)
    opened = server.manager.open(prompts, name=name)
    job = Job(server.manager, opened, request.receive)
    try:
        samples = await job.start()
        response_format.begin(samples)
        if prompts[0].options.stream:
            events = _stream(samples, response_format)
            first = await anext(events)
            return EventStream(first, events, job)
        async for sample, out in outputs(samples):
            sample.collect(out)
        response = json_response(response_format.full_response())
    except BaseException:
        job.close()
        raise
    job.close()
    return response


async def _stream(samples: Sequence[Sample], response_format: ResponseFormat) -> AsyncGenerator[bytes, None]:
    async for sample, out in outputs(samples):
        sample.count(out)
        data = response_format.events(sample, out)
        if data:
            yield data
    yield response_format.last_events() + DONE


class EventStream:
    """The ASGI response that sends events as they come.

    When the client disconnects, the job ends the generations, and that ends this stream.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], job: Job) -> None:
        self._first = first
        self._rest = rest
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send(_part(self._first))
            await self._send_rest(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client is gone
        finally:
            self._job.close()
            await self._rest.aclose()

    async def _send_rest(self, send: Send) -> None:
        try:
            async for data in self._rest:
                await send(_part(data))
        except OSError:
            raise
        except TercetError as error:
            await send(_part(_failure(error)))
        except Exception:
            logger.exception("A stream failed")
            await send(_part(_failure(internal_error())))


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _failure(error: TercetError) -> bytes:
    return b"data: " + envelope(error) + b"\n\n" + DONE
