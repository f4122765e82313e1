"""GET /v1/streams: continues a stream whose connection broke."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..errors import EngineDead, InvalidRequest, ResumeOff, StreamChanged
from .replay import Replay
from .resumable import STREAM_HEADER
from .routing import ROUTE, Server, decode
from .sse import EventStream
from .tenants import owner_of


async def continue_stream(server: Server, request: Request, body: None) -> ASGIApp:
    """Handler of /v1/streams.

    Raises ResumeOff, InvalidRequest, StreamNotFound, StreamGone, StreamChanged, EngineDead.
    """
    if server.streams is None:
        raise ResumeOff("streams cannot be continued; start the server with --resume-grace")
    last = request.headers.get("last-event-id")
    if last is None:
        raise InvalidRequest("the header Last-Event-ID is required", param="Last-Event-ID")
    owner = owner_of(request.scope)
    if server.saved is not None:
        weights, replay = server.manager.weights, partial(_replay, server)
        await server.saved.restore(last.partition("/")[0], owner, lambda: weights.version, request.scope, replay)
    stream, number = server.streams.find(last, owner)
    if stream.is_interrupted:
        raise EngineDead(server.manager.failure or "the engine has ended")
    if request.method == "HEAD":  # it must take the stream from nobody
        stream.check_event(number)
        return Response(media_type="text/event-stream", headers={STREAM_HEADER.decode(): stream.id})
    reader = stream.attach(number)
    reader.watch(request.receive)
    return EventStream(reader.parts(), server.manager, reader.close, [(STREAM_HEADER, stream.id.encode())])


async def _replay(server: Server, scope: Mapping[str, Any], body: bytes, replay: Replay) -> ASGIApp:
    """Handles the request of a recorded stream again. Raises StreamChanged if one of its adapters is not loaded now."""
    find = server.manager.adapters.find
    adapters = {prompt.options.adapter for prompt in replay.saved.request.prompts}
    missing = sorted(repr(ref.name) for ref in adapters if ref is not None and ref != find(ref.name))
    if missing:
        raise StreamChanged(
            f"the stream began with LoRA adapters that are not loaded or have changed ({', '.join(missing)}), and "
            "cannot continue here"
        )
    endpoint = server.recorded[replay.saved.request.path]
    request = Request({**scope, ROUTE: endpoint.path}, replay.receive)
    assert endpoint.body is not None
    return await endpoint.handler(server, request, await decode(server, request, endpoint.body, body))
