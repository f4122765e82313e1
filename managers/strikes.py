"""A record of the requests in whose steps the engine died. It outlives the requests.

A client that disconnects or gets an error often sends its request again. If the engine died once in a step of the first
request, the second one is tried alone. If it died twice, the second one is refused. A record expires after a while.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ..srt.errors import FatalRequest
from ..srt.io_struct import GenerateReq

MAX_STRIKES = 4096
"""Most requests with a strike. If there are more, the oldest strike is dropped."""


class _Strike(NamedTuple):
    cleared_at: int
    """With this number of output tokens, an equal request has passed the place of the fatal step."""
    until: float


class Strikes:
    """Digests of requests that may have crashed the engine (strikes), and of those that have (convictions)."""

    def __init__(self, memory_s: float, clock: Callable[[], float]) -> None:
        """`memory_s`: seconds until a strike or a conviction is forgotten."""
        self._memory_s = memory_s
        self._clock = clock
        self._strikes: dict[bytes, _Strike] = {}
        """The oldest one first."""
        self._convicted: dict[bytes, float] = {}
        """With the times at which they are forgotten."""

    def add(self, digest: bytes, cleared_at: int) -> None:
        """The engine died in a step of this request."""
        earlier = self._strikes.pop(digest, None)
        if earlier is not None:
            cleared_at = max(cleared_at, earlier.cleared_at)
        self._strikes[digest] = _Strike(cleared_at, self._clock() + self._memory_s)
        if len(self._strikes) > MAX_STRIKES:
            del self._strikes[next(iter(self._strikes))]

    def acquit(self, digest: bytes, num_tokens: float) -> None:
        """A request has this number of output tokens, and the engine runs. Infinite: the request is complete."""
        strike = self._strikes.get(digest)
        if strike is not None and num_tokens >= strike.cleared_at:
            del self._strikes[digest]

    def find(self, request: GenerateReq) -> tuple[bytes, int] | None:
        """The digest and `cleared_at` of the strike of an equal request. None: it has no strike."""
        now = self._clock()
        while self._strikes and next(iter(self._strikes.values())).until <= now:
            del self._strikes[next(iter(self._strikes))]
        if not self._strikes:
            return None
        digest = digest_of(request)
        strike = self._strikes.get(digest)
        return None if strike is None else (digest, strike.cleared_at)

    def convict(self, request: GenerateReq) -> None:
        """The engine died twice on this request."""
        digest = digest_of(request)
        self._strikes.pop(digest, None)
        self._convicted[digest] = self._clock() + self._memory_s

    def refusal(self, request: GenerateReq) -> FatalRequest | None:
        """An error if an equal request is convicted."""
        if not self._convicted:
            return None
        now = self._clock()
        self._convicted = {digest: until for digest, until in self._convicted.items() if until > now}
        until = self._convicted.get(digest_of(request))
        if until is None:
            return None
        return FatalRequest(f"the engine died twice on an equal request; it is refused for {until - now:.0f} s more")


def digest_of(request: GenerateReq) -> bytes:
    """Equal requests have equal digests. What does not change the computation does not count. Nor do the seed and the
    numbers of tokens, which depend on the engine's memory."""
    sampling = msgspec.structs.replace(
        request.options.sampling, sampling_seed=None, max_new_tokens=None, min_new_tokens=0
    )
    options = msgspec.structs.replace(
        request.options,
        sampling=sampling,
        stream=False,
        priority=0,
        tenant="",
        waiting_timeout=None,
        running_timeout=None,
        session_id="",
        retention_seconds=None,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(options) + request.input_ids, digest_size=16).digest()
