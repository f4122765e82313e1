"""Limits for each API key: `--max-concurrent-requests-per-key` and `--requests-per-minute-per-key`.

They count HTTP requests to the endpoints that run a model, before their bodies are read. Without API keys, each client
address has the limits, because nothing else tells clients apart: an IPv4 address, or an IPv6 network of 64 bits, which
one host can have. All connections without an address (UNIX sockets) count as one client.

The rate is that of a token bucket: it holds one minute's requests, and is refilled evenly.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import ClassVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import MAX_RETRY_AFTER_S, TercetError
from ..server_args import ServerArgs
from .error_handlers import error_response
from .tenants import key_of

MAX_CLIENTS = 10_000
"""Clients that are remembered. Of more, those that have not come for the longest time get full limits again."""
_HOLD = "tercet.hold"
LIMIT_HEADERS = ("x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests")
"""OpenAI's headers: requests in a minute, requests left now, and the time until the bucket is full."""


class TooManyRequests(TercetError):
    status: ClassVar[int] = 429
    err_type: ClassVar[str] = "requests"
    code: ClassVar[str | None] = "rate_limit_exceeded"


class TokenBucket:
    """Holds at most `capacity` tokens, is full at first, and is refilled evenly within a minute."""

    def __init__(self, capacity: int, now: float) -> None:
        self.capacity = capacity
        self._per_s = capacity / 60
        self._full_at = now
        """When it will be full if nothing more is taken."""

    def level(self, now: float) -> float:
        return self.capacity - max(self._full_at - now, 0.0) * self._per_s

    def take(self, now: float) -> bool:
        """Takes one token, if there is one."""
        if self.wait_s(now) > 0:
            return False
        self._full_at = max(self._full_at, now) + 1 / self._per_s
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until there is a token."""
        missing = 1.0 - self.level(now)
        return missing / self._per_s if missing > 1e-9 else 0.0

    def full_in_s(self, now: float) -> float:
        return max(self._full_at - now, 0.0)


class _Client:
    def __init__(self, bucket: TokenBucket | None) -> None:
        self.bucket = bucket
        """None: there is no limit on its rate."""
        self.num_running = 0

    def is_at_rest(self, now: float) -> bool:
        """The client has used none of its limits, so its entry can be removed."""
        return not self.num_running and (self.bucket is None or not self.bucket.full_in_s(now))


class _Hold:
    """One request of a client, which runs until its connection and its stream have ended."""

    def __init__(self, client: _Client) -> None:
        self.num_holders = 1
        self._client = client
        client.num_running += 1

    def release(self) -> None:
        self.num_holders -= 1
        if not self.num_holders:
            self._client.num_running -= 1


def hold_limit(scope: Scope) -> Callable[[], None]:
    """A request counts for its client's limit until the returned function is called, once, and its connection ends."""
    hold: _Hold | None = scope.get(_HOLD)
    if hold is None:
        return lambda: None
    hold.num_holders += 1
    return hold.release


class KeyLimits:
    """The limits of all clients, and what they have used of them."""

    def __init__(
        self,
        max_concurrent: int | None,
        per_minute: int | None,
        clock: Callable[[], float],
        *,
        has_keys: bool,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """`clock`: seconds from any start. `has_keys`: requests without a key are refused before."""
        self._max_concurrent = max_concurrent
        self._per_minute = per_minute
        self._has_keys = has_keys
        self._max_clients = max_clients
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """The one that came last is the last."""
        self._mean_s = 1.0
        """Mean duration of a request, over about the last ten."""

    @classmethod
    def of(cls, args: ServerArgs, clock: Callable[[], float]) -> KeyLimits | None:
        """None if the settings have no such limit."""
        concurrent, per_minute = args.max_concurrent_requests_per_key, args.requests_per_minute_per_key
        if concurrent is None and per_minute is None:
            return None
        return cls(concurrent, per_minute, clock, has_keys=bool(args.api_keys))

    def __len__(self) -> int:
        return len(self._clients)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets `app` answer the request if its client is within its limits. Answers 429 otherwise."""
        client = self._client(name_of(scope, has_keys=self._has_keys))
        start_s = self._clock()
        try:
            self._check(client, start_s)
        except TooManyRequests as error:
            await error_response(error)(scope, receive, self._with_headers(client, send))
            return
        hold = scope[_HOLD] = _Hold(client)
        try:
            await app(scope, receive, self._with_headers(client, send))
        finally:
            hold.release()
            self._mean_s += 0.1 * (self._clock() - start_s - self._mean_s)

    def _client(self, name: str) -> _Client:
        now = self._clock()
        client = self._clients.pop(name, None)
        if client is None:
            bucket = None if self._per_minute is None else TokenBucket(self._per_minute, now)
            client = _Client(bucket)
            self._forget(now)
        self._clients[name] = client
        return client

    def _forget(self, now: float) -> None:
        """Makes a place for a new client. A client with a running request stays: connections bound their number."""
        for _ in range(2):  # so the number of clients at rest falls
            if self._clients and next(iter(self._clients.values())).is_at_rest(now):
                self._clients.popitem(last=False)
        if len(self._clients) >= self._max_clients:
            idle = next((name for name, client in self._clients.items() if not client.num_running), None)
            if idle is not None:
                del self._clients[idle]

    def _check(self, client: _Client, now: float) -> None:
        """Takes one request from the client's limits. Raises TooManyRequests, and then takes nothing."""
        if self._max_concurrent is not None and client.num_running >= self._max_concurrent:
            message = f"{client.num_running} requests are running, and the limit is {self._max_concurrent}"
            raise _refusal(message, self._mean_s / self._max_concurrent)
        bucket = client.bucket
        if bucket is not None and not bucket.take(now):
            raise _refusal(f"the limit is {bucket.capacity} requests per minute", bucket.wait_s(now))

    def _with_headers(self, client: _Client, send: Send) -> Send:
        bucket = client.bucket
        if bucket is None:
            return send

        def send_with_headers(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                now = self._clock()
                values = (bucket.capacity, math.floor(bucket.level(now) + 1e-9), _duration(bucket.full_in_s(now)))
                limits = [
                    (name.encode(), str(value).encode()) for name, value in zip(LIMIT_HEADERS, values, strict=True)
                ]
                message = {**message, "headers": [*message.get("headers", ()), *limits]}
            return send(message)

        return send_with_headers


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


def _refusal(message: str, wait_s: float) -> TooManyRequests:
    retry_after_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
    error = TooManyRequests(f"{message}; try again in {retry_after_s} s")
    error.retry_after_s = retry_after_s
    return error


def _duration(seconds: float) -> str:
    """In OpenAI's form: "1m2.5s", "2.5s" or "120ms"."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest_s = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest_s:g}s" if minutes else f"{rest_s:g}s"
