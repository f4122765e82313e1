"""`Endpoint`, and the steps of every request: check the query, decode the body, call the handler, send a response.

The routes, the OpenAPI document and the tables of docs/api.md are made from the list in endpoints.py.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...managers.tokenizer_manager import TokenizerManager
from ..errors import InvalidRequest, QueueFull, TercetError
from .error_handlers import BodyTooLarge, error_response, internal_error
from .json_limits import check_limits
from .key_limits import Limits
from .limited_requests import LimitedRequests
from .response_store import ResponseStore
from .resumable import ResumableStreams
from .saved_streams import BODY, SavedStreams
from .wire import BodyCodec, shown

logger = logging.getLogger(__name__)

IGNORED_QUERY = frozenset({"api-version", "beta"})
"""Query parameters that every path accepts and that have no effect. Clients made for Azure and Anthropic send them."""

P = ParamSpec("P")
T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
"""Maximum size of a body. A larger body is refused with 413 before it is read."""
MAX_HELD_BYTES = 512 * 2**20
"""Maximum size of the bodies of all requests that are read or unanswered. Beyond it, a body is refused with 503.

What a request takes later (its messages, its text, its token ids) is a small multiple of its body.
"""
SMALL_BODY_BYTES = 1 << 16
"""Maximum size of a small body.

A small body is decoded, rendered and checked in the event loop, which takes a few milliseconds. For a larger body a
thread does this, after a check of the limits on its JSON.
"""
_IS_LARGE = "tercet.body_is_large"
_NUM_BYTES = "tercet.num_body_bytes"
ROUTE = "tercet.route"
"""In the scope of a request to an endpoint that runs a model: the path of the endpoint."""
_encode = msgspec.json.Encoder().encode


class HeldBytes:
    """Counts the bytes of the bodies of all requests that are read or unanswered."""

    def __init__(self) -> None:
        self.num_bytes = 0


@dataclass(frozen=True)
class Server:
    """The state that all handlers share."""

    manager: TokenizerManager
    version: str
    health_timeout_s: float = 20.0
    """How long /health_generate waits for its token."""
    state_timeout_s: float = 1.0
    """How long an endpoint waits for the scheduler's state, before it answers with the last known state."""
    flush_timeout_s: float = 5.0
    """How long /flush_cache waits for the scheduler's reply, in addition to the request's `timeout`."""
    metrics: MetricsSource | None = None
    """Makes the page of /metrics; None without --enable-metrics."""
    key_limits: Limits | None = None
    """None without such limits."""
    streams: ResumableStreams | None = None
    """None without --resume-grace."""
    saved: SavedStreams | None = None
    """None without --resume-file."""
    responses: ResponseStore | None = None
    """None without --response-store-mib."""
    recorded: Mapping[str, Endpoint] = field(default_factory=dict)
    """The endpoints whose streams are recorded, by path."""
    share: float = 1.0
    """The part of MAX_HELD_BYTES that this process may use. All processes of a server together have it once."""
    started: int = field(default_factory=lambda: int(time.time()))
    decoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "body-decoder"))
    """Decodes large bodies, one at a time, because decoding holds the interpreter's lock."""
    held: HeldBytes = field(default_factory=HeldBytes)


class MetricsSource(Protocol):
    def render(self) -> tuple[bytes, str]:
        """The page and its content type."""


Handler = Callable[[Server, Request, Any], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Query:
    """A query parameter of a URL. `type`: its type in JSON schema."""

    name: str
    description: str
    type: str = "number"


@dataclass(frozen=True)
class Endpoint:
    """One endpoint. Without `body`, a request's body must be empty. Undeclared query parameters are refused."""

    methods: tuple[str, ...]
    path: str
    summary: str
    handler: Handler
    body: BodyCodec[Any] | None = None
    body_may_be_empty: bool = False
    """An empty body means `{}`."""
    query: tuple[Query, ...] = ()
    answer: Any = None
    """Type of the JSON response, for the documentation; None for a response of `media_type`."""
    media_type: str = "text/html"
    streams: Any = None
    """Type of a stream's events; None for an endpoint that never streams."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same endpoint."""
    runs_model: bool = False
    """Its requests count for the limits of their API keys, and are traced."""


class BoundEndpoint:
    """The ASGI app of one endpoint."""

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self._endpoint = endpoint
        self.server = server
        self._query = {query.name for query in endpoint.query}
        self._limits: LimitedRequests | None = None
        if endpoint.runs_model and server.key_limits is not None:
            has_keys = bool(server.manager.server_args.api_keys)
            self._limits = LimitedRequests(server.key_limits, has_keys=has_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._endpoint.runs_model:
            scope[ROUTE] = self._endpoint.path
        if self._limits is None:
            await self._serve(scope, receive, send)
        else:
            await self._limits.serve(self._serve, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._respond(scope, receive, send)
        finally:
            self.server.held.num_bytes -= scope.pop(_NUM_BYTES, 0)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            if name in IGNORED_QUERY:
                continue
            if name not in self._query:
                known = ", ".join(sorted(self._query)) or "none"
                raise InvalidRequest(f"unknown query parameter {shown(name)}; known: {known}", param=name[:80])
            num_values = len(request.query_params.getlist(name))
            if num_values > 1:
                raise InvalidRequest(
                    f"query parameter {shown(name)} must be given once, got {num_values} values", param=name
                )
        body = await self._body(request)
        return await self._endpoint.handler(self.server, request, body)

    async def _body(self, request: Request) -> Any:
        """The decoded body. Raises BodyTooLarge, QueueFull or InvalidRequest without reading the rest of the body."""
        too_large = f"the body must have at most {MAX_BODY_BYTES} bytes"
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
            raise BodyTooLarge(too_large)
        for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
            coding = request.headers.get(name, plain).lower()
            if coding not in ("", plain):
                raise InvalidRequest(f"{name} {shown(coding)} is not supported; send the body without compression")
        data = bytearray()
        async for part in request.stream():
            data += part
            hold_bytes(self.server, request, len(part), too_large)
        return await self._decoded(request, data)

    async def _decoded(self, request: Request, data: bytearray) -> Any:
        if data.startswith(codecs.BOM_UTF8):  # some editors write it; RFC 8259, section 8.1, allows to ignore it
            del data[: len(codecs.BOM_UTF8)]
        codec = self._endpoint.body
        if codec is None:
            if bytes(data).strip() not in (b"", b"{}", b"null"):
                raise InvalidRequest(f"{self._endpoint.path} accepts no body")
            return None
        if not data and self._endpoint.body_may_be_empty:
            data += b"{}"
        body = await decode(self.server, request, codec, data)
        if self._endpoint.path in self.server.recorded and body.stream:
            request.scope[BODY] = bytes(data)
        return body


def hold_bytes(server: Server, request: Request, num_bytes: int, too_large: str) -> None:
    """Counts more bytes of a request: of its body, or of what it continues.

    Raises BodyTooLarge with the text `too_large` if they are too many for a request, and QueueFull if all requests
    together have too many.
    """
    num_held = request.scope[_NUM_BYTES] = request.scope.get(_NUM_BYTES, 0) + num_bytes
    server.held.num_bytes += num_bytes
    if num_held > MAX_BODY_BYTES:
        raise BodyTooLarge(too_large)
    if server.held.num_bytes > MAX_HELD_BYTES * server.share:
        raise QueueFull("the bodies of unanswered requests exceed the server's memory limit; try again later")


def hold_conversation(server: Server, request: Request, num_bytes: int) -> None:
    """Counts the conversation that a request continues as a part of its body. Raises as `hold_bytes`."""
    if num_bytes > SMALL_BODY_BYTES:
        request.scope[_IS_LARGE] = True
    hold_bytes(
        server,
        request,
        num_bytes,
        f"the body and the conversation of previous_response_id must have at most {MAX_BODY_BYTES} bytes together",
    )


async def decode(server: Server, request: Request, codec: BodyCodec[T], data: bytes | bytearray) -> T:
    """The body of a request. A large one is decoded in a thread. Raises InvalidRequest."""
    if len(data) <= SMALL_BODY_BYTES:
        return codec.decode(data)
    request.scope[_IS_LARGE] = True
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(server.decoder, _decode_large, codec, data)


def _decode_large(codec: BodyCodec[T], data: bytes | bytearray) -> T:
    check_limits(data)
    return codec.decode(data)


async def in_thread_if_large(request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `work`: in a thread if the request's body is large, in the event loop if it is small.

    Use it for work whose time grows with the body.
    """
    if _IS_LARGE not in request.scope:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def json_response(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json")
