"""Limits HTTP requests by client: each request to an endpoint that runs a model counts before its body is read.

Without API keys, each client address has the limits, because nothing else tells clients apart: an IPv4 address, or an
IPv6 network of 64 bits, which one host can have. All connections without an address (UNIX sockets) count as one client.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import TercetError
from .error_handlers import error_response
from .key_limits import Limits, TokenBucket
from .tenants import key_of

_HOLD = "tercet.hold"
LIMIT_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
"""OpenAI's headers: requests in a minute, requests left now, and the time until the bucket is full."""


class _Hold:
    """One request of a client, which runs until its connection and its stream have ended."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.num_holders = 1
        self._release = release

    def release(self) -> None:
        self.num_holders -= 1
        if not self.num_holders:
            self._release()


def hold_limit(scope: Scope) -> Callable[[], None]:
    """A request counts for its client's limit until the returned function is called, once, and its connection ends."""
    hold: _Hold | None = scope.get(_HOLD)
    if hold is None:
        return lambda: None
    hold.num_holders += 1
    return hold.release


class LimitedRequests:
    """Lets the requests of clients that are within their limits reach an app."""

    def __init__(self, limits: Limits, *, has_keys: bool) -> None:
        """`has_keys`: requests without a key are refused before."""
        self._limits = limits
        self._has_keys = has_keys

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 429 if the client is beyond its limits."""
        try:
            taken = await self._limits.take(name_of(scope, has_keys=self._has_keys))
        except TercetError as error:
            await error_response(error)(scope, receive, send)
            return
        if taken.bucket is not None:
            send = _with_headers(taken.bucket, send)
        if taken.refusal is not None:
            await error_response(taken.refusal)(scope, receive, send)
            return
        hold = scope[_HOLD] = _Hold(taken.release)
        try:
            await app(scope, receive, send)
        finally:
            hold.release()


def name_of(scope: Scope, *, has_keys: bool) -> str:
    """Who has the limits that this request uses."""
    if has_keys:
        return key_of(scope) or "key"
    address = (scope.get("client") or ("",))[0]
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _with_headers(bucket: TokenBucket, send: Send) -> Send:
    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            values = (bucket.capacity, math.floor(bucket.level + 1e-9), _duration(bucket.full_in_s))
            limits = [(name.encode(), str(value).encode()) for name, value in zip(LIMIT_HEADERS, values, strict=True)]
            message = {**message, "headers": [*message.get("headers", ()), *limits]}
        return send(message)

    return send_with_headers


def _duration(seconds: float) -> str:
    """In OpenAI's form: "1m2.5s", "2.5s" or "120ms"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest_s = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest_s:g}s" if minutes else f"{rest_s:g}s"
