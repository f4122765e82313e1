"""One way from generations to an HTTP answer, in one piece or as server-sent events; what it looks like is a Face's.

The first output is awaited before the headers are sent, so that a request which cannot be served has its HTTP status.
What fails later is one error event, then `[DONE]`.
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
from .job import Job, Sample, check_amount, outputs
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
    """One server-sent event; JSON has no line breaks, so its data is always one line."""
    return b"data: " + _encode(value) + b"\n\n"


class Face(ABC):
    """How one request's outputs look on the wire. One object per request."""

    @abstractmethod
    def begin(self, samples: Sequence[Sample]) -> None:
        """Called once, before any of the others."""

    @abstractmethod
    def events(self, sample: Sample, out: TextOut) -> bytes:
        """What one output adds to the stream: any number of events. The sample has counted the output."""

    def last_events(self) -> bytes:
        """What follows when every sample has finished, before `[DONE]`."""
        return b""

    @abstractmethod
    def whole(self) -> Any:
        """The answer in one piece; the samples have collected their outputs."""


async def answer(server: Server, request: Request, prompts: Sequence[Prompt], *, face: Face, name: str) -> ASGIApp:
    """Runs the prompts and returns the response, which closes the job when it has been sent.

    `name`: what the client may abort. A single prompt bears it as its rid; several prompts are known by it together.
    """
    check_amount(prompts)
    opened = server.manager.open(prompts, name=name)
    job = Job(server.manager, opened, request.receive)
    try:
        samples = await job.start()
        face.begin(samples)
        if prompts[0].options.stream:
            events = _stream(samples, face)
            first = await anext(events)
            return EventStream(first, events, job)
        async for sample, out in outputs(samples):
            sample.collect(out)
        response = json_response(face.whole())
    except BaseException:
        job.close()
        raise
    job.close()
    return response


async def _stream(samples: Sequence[Sample], face: Face) -> AsyncGenerator[bytes, None]:
    async for sample, out in outputs(samples):
        sample.count(out)
        data = face.events(sample, out)
        if data:
            yield data
    yield face.last_events() + DONE


class EventStream:
    """The ASGI response that sends events as they come. A client that has gone is the job's affair: it ends the
    generations, and with them this stream."""

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
