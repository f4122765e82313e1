"""What an endpoint is, and the road of every request: query, body, handler, and an answer whatever happens.

The list of `Endpoint`s (http_server.py) makes the routes, the OpenAPI document and the tables of docs/api.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...managers.tokenizer_manager import TokenizerManager
from ..errors import InvalidRequest, ModelNotFound, TercetError
from .error_handlers import BodyTooLarge, error_response, internal_error
from .wire import BodyCodec, shown

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
"""A larger body is answered 413, before it is read."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Server:
    """What handlers share."""

    manager: TokenizerManager
    version: str
    health_timeout_s: float = 20.0
    """How long /health_generate waits for its token."""
    state_timeout_s: float = 5.0
    """How long an endpoint waits for the scheduler to tell its state."""
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, model: str | None) -> str:
        """The served name; raises ModelNotFound for any but that, the model's path and "default"."""
        args = self.manager.server_args
        if model is not None and model not in (args.model_name, args.model_path, "default"):
            raise ModelNotFound(
                f"the model {shown(model)} does not exist; served here: {args.model_name!r}", param="model"
            )
        return args.model_name


Handler = Callable[[Server, Request, Any], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Query:
    """A parameter in the URL."""

    name: str
    description: str


@dataclass(frozen=True)
class Endpoint:
    """One route. Without `body` a request's body must be empty; a query parameter that is not declared is refused."""

    methods: tuple[str, ...]
    path: str
    summary: str
    handler: Handler
    body: BodyCodec[Any] | None = None
    query: tuple[Query, ...] = ()
    answer: Any = None
    """Type of the JSON answer, for the documentation."""
    streams: Any = None
    """Type of the events of a stream, where there may be one."""
    also: tuple[str, ...] = ()
    """Other paths of the same endpoint."""


class BoundEndpoint:
    """An endpoint as the ASGI app that serves it."""

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self._endpoint = endpoint
        self._server = server
        self._query = {one.name for one in endpoint.query}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            answer = await self._answer(request)
        except TercetError as error:
            answer = error_response(error)
        except ClientDisconnect:
            return
        except Exception:
            logger.exception("%s %s failed", request.method, self._endpoint.path)
            answer = error_response(internal_error())
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        for name in request.query_params:
            if name not in self._query:
                known = ", ".join(sorted(self._query)) or "none"
                raise InvalidRequest(f"unknown query parameter {shown(name)}; known: {known}", param=name[:80])
        data = await read_body(request)
        if self._endpoint.body is not None:
            return await self._endpoint.handler(self._server, request, self._endpoint.body.decode(data))
        if data.strip() not in (b"", b"{}", b"null"):
            raise InvalidRequest(f"{self._endpoint.path} takes no body")
        return await self._endpoint.handler(self._server, request, None)


async def read_body(request: Request) -> bytes:
    """All of the body; raises BodyTooLarge as soon as it is known to be."""
    refused = BodyTooLarge(f"the body must have at most {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise refused
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest(f"content-encoding {shown(encoding)} is not supported; send the body as it is")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise refused
        parts.append(part)
    return b"".join(parts)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(_encode(value), status, media_type="application/json")
