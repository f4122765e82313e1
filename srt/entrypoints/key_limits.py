"""Limits for each API key: `--max-concurrent-requests-per-key` and `--requests-per-minute-per-key`.

This module counts. limited_requests.py limits HTTP requests with it, and worker_limits.py those of HTTP workers.
The rate is that of a token bucket: it holds one minute's requests, and is refilled evenly.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

from ..errors import MAX_RETRY_AFTER_S, TercetError
from ..server_args import ServerArgs

MAX_CLIENTS = 10_000
"""Clients that are remembered. Of more, those that have not come for the longest time get full limits again."""


class TooManyRequests(TercetError):
    status: ClassVar[int] = 429
    err_type: ClassVar[str] = "requests"
    code: ClassVar[str | None] = "rate_limit_exceeded"


class TokenBucket:
    """Holds at most `capacity` tokens, and is refilled evenly within a minute."""

    def __init__(self, capacity: int, clock: Callable[[], float], full_at: float | None = None) -> None:
        """`clock`: seconds from any start. `full_at`: when it will be full if nothing is taken; None: it is full."""
        self.capacity = capacity
        self.full_at = clock() if full_at is None else full_at
        self._clock = clock
        self._per_s = capacity / 60

    @property
    def level(self) -> float:
        return self.capacity - self.full_in_s * self._per_s

    @property
    def full_in_s(self) -> float:
        return max(self.full_at - self._clock(), 0.0)

    @property
    def wait_s(self) -> float:
        """Seconds until there is a token."""
        missing = 1.0 - self.level
        return missing / self._per_s if missing > 1e-9 else 0.0

    def take(self) -> bool:
        """Takes one token, if there is one."""
        if self.wait_s > 0:
            return False
        self.full_at = max(self.full_at, self._clock()) + 1 / self._per_s
        return True


class Taken(NamedTuple):
    """What a request has taken from the limits of its client."""

    refusal: TooManyRequests | None
    """Why the request is refused, and has taken nothing; None: it may run."""
    bucket: TokenBucket | None
    """The client's bucket after the request; None: there is no limit on its rate."""
    release: Callable[[], None]
    """Must be called once when the request has ended. After a refusal it does nothing."""


class Limits(Protocol):
    """The limits of all clients, in this process or in another one."""

    async def take(self, client: str) -> Taken:
        """Raises EngineDead if the process that counts does not answer."""


class _Client:
    def __init__(self, bucket: TokenBucket | None) -> None:
        self.bucket = bucket
        """None: there is no limit on its rate."""
        self.num_running = 0

    @property
    def is_at_rest(self) -> bool:
        """The client has used none of its limits, so its entry can be removed."""
        return not self.num_running and (self.bucket is None or not self.bucket.full_in_s)


class KeyLimits:
    """The limits of all clients, and what they have used of them."""

    def __init__(
        self,
        max_concurrent: int | None,
        per_minute: int | None,
        clock: Callable[[], float],
        *,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        """`clock`: seconds from any start."""
        self._max_concurrent = max_concurrent
        self._per_minute = per_minute
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
        return cls(concurrent, per_minute, clock)

    def __len__(self) -> int:
        return len(self._clients)

    async def take(self, client: str) -> Taken:
        return self.take_now(client)

    def take_now(self, name: str) -> Taken:
        """Takes one request from the limits of the client `name`."""
        client = self._client(name)
        try:
            self._check(client)
        except TooManyRequests as error:
            return Taken(error, client.bucket, _nothing)
        client.num_running += 1
        start_s = self._clock()

        def release() -> None:
            client.num_running -= 1
            self._mean_s += 0.1 * (self._clock() - start_s - self._mean_s)

        return Taken(None, client.bucket, release)

    def _client(self, name: str) -> _Client:
        client = self._clients.pop(name, None)
        if client is None:
            bucket = None if self._per_minute is None else TokenBucket(self._per_minute, self._clock)
            client = _Client(bucket)
            self._forget()
        self._clients[name] = client
        return client

    def _forget(self) -> None:
        """Makes a place for a new client. A client with a running request stays: connections bound their number."""
        for _ in range(2):  # so the number of clients at rest falls
            if self._clients and next(iter(self._clients.values())).is_at_rest:
                self._clients.popitem(last=False)
        if len(self._clients) >= self._max_clients:
            idle = next((name for name, client in self._clients.items() if not client.num_running), None)
            if idle is not None:
                del self._clients[idle]

    def _check(self, client: _Client) -> None:
        """Takes a token from the client's bucket. Raises TooManyRequests, and then takes nothing."""
        if self._max_concurrent is not None and client.num_running >= self._max_concurrent:
            message = f"{client.num_running} requests are running, and the limit is {self._max_concurrent}"
            raise _refusal(message, self._mean_s / self._max_concurrent)
        bucket = client.bucket
        if bucket is not None and not bucket.take():
            raise _refusal(f"the limit is {bucket.capacity} requests per minute", bucket.wait_s)


def _refusal(message: str, wait_s: float) -> TooManyRequests:
    retry_after_s = min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
    error = TooManyRequests(f"{message}; try again in {retry_after_s} s")
    error.retry_after_s = retry_after_s
    return error


def _nothing() -> None:
    """Nothing was taken."""
