"""The scheduler's two ears and mouths: requests in, tokens out to the detokenizer, replies to the TokenizerManager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..srt.errors import TercetError
from ..srt.io_struct import (
    AbortFinish,
    BatchTokenOut,
    BrokenMessage,
    Counts,
    Heartbeat,
    SchedulerState,
    ToDetokenizer,
    TokenOut,
    ToScheduler,
    ToTokenizer,
)

_HEARTBEAT_S = 0.5

M_contra = TypeVar("M_contra", contravariant=True)


class Inbox(Protocol):
    """`ipc.Receiver`, or a test's list."""

    def drain(self) -> Sequence[ToScheduler | BrokenMessage]: ...

    def wait(self, timeout_s: float) -> bool: ...


class Outbox(Protocol[M_contra]):
    """`ipc.Sender`, or a test's list."""

    def send(self, message: M_contra, /) -> None: ...


class SchedulerIO:
    """Outputs of one turn leave together in `flush`."""

    def __init__(self, inbox: Inbox, detokenizer: Outbox[ToDetokenizer], tokenizer: Outbox[ToTokenizer]) -> None:
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._outs: list[TokenOut] = []
        self._next_heartbeat = 0.0

    def receive(self, *, may_sleep: bool) -> Sequence[ToScheduler | BrokenMessage]:
        """All messages that are here; with nothing to do, sleeps until one comes, or a heartbeat is due."""
        if may_sleep:
            self._inbox.wait(_HEARTBEAT_S)
        return self._inbox.drain()

    def put(self, out: TokenOut) -> None:
        self._outs.append(out)

    def refuse(self, rid: str, error: TercetError, num_prompt_tokens: int = 0) -> None:
        """Answers a request that never became one. It takes the road of all outputs."""
        self.put(TokenOut(rid=rid, token_ids=[], finish=AbortFinish.of(error), counts=Counts(num_prompt_tokens)))

    def reply(self, message: ToTokenizer) -> None:
        self._tokenizer.send(message)

    def flush(self, state: Callable[[], SchedulerState]) -> None:
        """Sends what this turn produced, and a heartbeat with the state when one is due."""
        if self._outs:
            self._detokenizer.send(BatchTokenOut(self._outs))
            self._outs = []
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + _HEARTBEAT_S
            self._tokenizer.send(Heartbeat(state()))
