"""Limits of clients whose requests reach several HTTP workers: a worker asks its parent, which counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..worker_messages import LimitCall, LimitRelease, LimitReply
from .key_limits import KeyLimits, Taken, TokenBucket, TooManyRequests


class Ask(Protocol):
    async def __call__(self, question: Callable[[int], LimitCall], reply_type: type[LimitReply], /) -> LimitReply:
        """Sends `question(call_id)` to the parent, and waits for the reply. Raises EngineDead if none comes."""


class AskedLimits:
    """The limits of all clients, as a worker has them."""

    def __init__(self, ask: Ask, send: Callable[[LimitRelease], None], clock: Callable[[], float]) -> None:
        """`clock`: that of the parent, too."""
        self._ask = ask
        self._send = send
        self._clock = clock

    async def take(self, client: str) -> Taken:
        sent: list[int] = []

        def question(call_id: int) -> LimitCall:
            sent.append(call_id)
            return LimitCall(call_id, client)

        def release() -> None:
            for call_id in sent:
                self._send(LimitRelease(call_id))

        try:
            reply = await self._ask(question, LimitReply)
        except BaseException:
            release()  # the parent may count the request later
            raise
        bucket = None
        if reply.per_minute is not None:
            bucket = TokenBucket(reply.per_minute, self._clock, reply.full_at)
        error = None
        if reply.refusal is not None:
            error = TooManyRequests(reply.refusal)
            error.retry_after_s = reply.retry_after_s
        return Taken(error, bucket, release)


class CountedRequests:
    """The requests of one worker that run, as the parent counts them."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits
        self._releases: dict[int, Callable[[], None]] = {}
        """By the number of the call."""

    def take(self, call: LimitCall) -> LimitReply:
        taken = self._limits.take_now(call.client)
        bucket, error = taken.bucket, taken.refusal
        if error is None:
            self._releases[call.call_id] = taken.release
        return LimitReply(
            call_id=call.call_id,
            refusal=None if error is None else error.message,
            retry_after_s=None if error is None else error.retry_after_s,
            per_minute=None if bucket is None else bucket.capacity,
            full_at=0.0 if bucket is None else bucket.full_at,
        )

    def release(self, call_id: int) -> None:
        """The request of this call has ended. Does nothing if it was refused."""
        release = self._releases.pop(call_id, None)
        if release is not None:
            release()

    def release_all(self) -> None:
        """The worker has died."""
        while self._releases:
            self._releases.popitem()[1]()
