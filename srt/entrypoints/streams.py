"""GET /v1/streams: continues a stream whose connection broke."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..errors import InvalidRequest, ResumeOff
from .resumable import STREAM_HEADER
from .routing import Server
from .sse import EventStream
from .tenants import key_of


async def continue_stream(server: Server, request: Request, body: None) -> ASGIApp:
    """Handler of /v1/streams. Raises ResumeOff, InvalidRequest, StreamNotFound, StreamGone."""
    if server.streams is None:
        raise ResumeOff("streams cannot be continued; start the server with --resume-grace")
    last = request.headers.get("last-event-id")
    if last is None:
        raise InvalidRequest("the header Last-Event-ID is required", param="Last-Event-ID")
    stream, number = server.streams.find(last, key_of(request.scope) or "")
    if request.method == "HEAD":  # it must take the stream from nobody
        return Response(media_type="text/event-stream", headers={STREAM_HEADER.decode(): stream.id})
    reader = stream.attach(number)
    reader.watch(request.receive)
    return EventStream(reader.parts(), server.manager, reader.close, [(STREAM_HEADER, stream.id.encode())])
