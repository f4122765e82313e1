"""The scheduler's messages: requests in, tokens out to the detokenizer, replies out to the TokenizerManager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..srt.errors import TercetError
from ..srt.io_struct import (
    AbortFinish,
    BatchTokenOut,
    BrokenMessage,
    Counts,
    Heartbeat,
    NextTokens,
    SchedulerState,
    ToDetokenizer,
    TokenOut,
    ToScheduler,
    ToTokenizer,
)
from ..srt.settings.failures import HEARTBEAT_S

M_contra = TypeVar("M_contra", contravariant=True)


class Inbox(Protocol):
    """An `ipc.Receiver`, or a list in a test."""

    def drain(self) -> Sequence[ToScheduler | BrokenMessage]: ...

    def wait(self, timeout_s: float) -> bool: ...


class Outbox(Protocol[M_contra]):
    """An `ipc.Sender`, or a list in a test."""

    def send(self, message: M_contra, /) -> None: ...


class SchedulerIO:
    """Receives and sends messages. `flush` sends all outputs of a turn in one message."""

    def __init__(
        self,
        inbox: Inbox,
        detokenizer: Outbox[ToDetokenizer],
        tokenizer: Outbox[ToTokenizer],
        clock: Callable[[], float],
    ) -> None:
        """`clock`: seconds from any start. It is the scheduler's."""
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._clock = clock
        self._outs: list[TokenOut] = []
        self.next_tokens = NextTokens([], [], [])
        """What ResultProcessor adds here is sent before all other outputs of the turn."""
        self._next_heartbeat = clock()

    def receive(self, *, may_sleep: bool) -> Sequence[ToScheduler | BrokenMessage]:
        """All messages that have arrived. With `may_sleep`, it first waits for a message or for the next heartbeat."""
        if may_sleep:
            self._inbox.wait(HEARTBEAT_S)
        return self._inbox.drain()

    def put(self, out: TokenOut) -> None:
        self._outs.append(out)

    def refuse(self, rid: str, error: TercetError, num_prompt_tokens: int = 0) -> None:
        """Answers a request for which no Req was made. The answer takes the path of all outputs."""
        self.put(TokenOut(rid=rid, token_ids=[], finish=AbortFinish.of(error), counts=Counts(num_prompt_tokens)))

    def reply(self, message: ToTokenizer) -> None:
        self._tokenizer.send(message)

    def flush(self, state: Callable[[], SchedulerState]) -> None:
        """Sends the outputs of this turn, and a heartbeat with the state if one is due."""
        if self._outs or self.next_tokens.rids:
            self._detokenizer.send(BatchTokenOut(self._outs, self.next_tokens))
            self._outs, self.next_tokens = [], NextTokens([], [], [])
        now = self._clock()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self._tokenizer.send(Heartbeat(state()))
