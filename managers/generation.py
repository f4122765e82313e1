"""A Generation: one sample as its client sees it, from its request to its last output."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Container, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ..srt.errors import BY_TYPE, QueueFull, TercetError
from ..srt.io_struct import AbortFinish, Counts, FinishReason, GenerateReq, Resumed, TextOut, TokenOut, joined
from ..srt.request_options import RequestOptions

ABORT_TIMEOUT_S = 30.0
"""The maximum wait for the last output of an aborted sample. A step may take seconds on a CPU."""

MAX_BACKLOG = 64
"""The maximum number of outputs that wait for a slow reader. More are merged into one, which takes less memory."""


_ABORTED = "aborted by the client"


class Timings(NamedTuple):
    """Times of a sample that has ended, by their names in `meta_info`. None: it ended before that event."""

    queue_time: float | None
    """Seconds in the scheduler's waiting queue, until the first admission."""
    first_token_latency: float | None
    """Seconds from submission to the first token."""
    decode_throughput: float | None
    """Tokens per second after the first token."""
    prefill_time: float | None = None
    """Seconds from the first admission to the first token."""


class GenerationOwner(Protocol):
    """The prompt that a sample belongs to."""

    rid: str
    prompt_ids: Sequence[int]
    options: RequestOptions

    def stop(self, generation: Generation) -> None:
        """Tells the engine to stop this sample."""

    def held_text(self, generation: Generation) -> str:
        """The end of the text of its tokens, which the detokenizer has not sent yet."""

    def on_end(self, generation: Generation) -> None:
        """Called after the last output of a sample."""


class Generation:
    """One sample of one prompt. Iterate over its outputs, or call `result()` for all of them as one.

    It exists from the moment its request is accepted, before the prompt is tokenised, until its last output. Outputs
    that arrive between two reads are merged. So a slow reader gets fewer and larger outputs, and loses nothing.
    """

    def __init__(self, owner: GenerationOwner, index: int, key: str) -> None:
        self.index = index
        """The index among the `n` samples of its prompt."""
        self.key = key
        """The unique id of the sample in the scheduler and the detokenizer."""
        self.first_token_s: float | None = None
        """Seconds from submission to the first token."""
        self.finished_s: float | None = None
        """Seconds from submission to the last output; None before."""
        self.timings: Timings | None = None
        """Set with the last output, in a server that measures them (`--enable-metrics`)."""
        self.on_end: Callable[[], object] | None = None
        """Called once, when the sample ends. None: no call."""
        self.on_queue_full: Callable[[], object] | None = None
        """Called instead of ending by QueueFull. Its owner sends the sample again. None: QueueFull ends the sample."""
        self.is_over = False
        self.is_complete = False
        """It has ended by itself: neither by an error nor by an abort."""
        self.request: GenerateReq | None = None
        """What the engine has, or will get as soon as it takes requests again; None before."""
        self.output_ids: list[int] = []
        """All tokens that have come, read or not. A restarted engine goes on after them."""
        self.num_recoveries = 0
        """How often the engine was restarted while it worked on this sample."""
        self.weight_version = "default"
        """The name of the weights that computed its last tokens."""
        self.has_begun = False
        """It had its first step in an engine that has died. If it has output, nobody need know."""
        self.num_strikes = 0
        """How often the engine died by itself in a step of this sample."""
        self.waits_since = 0.0
        """When the TokenizerManager got its request, on the clock of `PauseControl.now`."""
        self.ran_s = 0.0
        """How long it ran in engines that have died, from its first token on."""
        self._owner = owner
        self._submitted = time.monotonic()
        self._is_sent = False
        self._sent_at = 0.0
        """When the engine got its request, on the clock of `waits_since`."""
        self._is_stopped = False
        self._timeout: asyncio.TimerHandle | None = None
        self._waiting: list[TextOut] = []
        self._counts = Counts(0)
        self._notify: Callable[[], object] = _nobody

    @property
    def rid(self) -> str:
        """The client's name for the prompt. All samples of the prompt share it."""
        return self._owner.rid

    @property
    def submitted_s(self) -> float:
        """When it was given to the engine, on the monotonic clock; before, when its request was accepted."""
        return self._submitted

    @property
    def options(self) -> RequestOptions:
        """The options of its prompt."""
        return self._owner.options

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Empty until the prompt is tokenised."""
        return self._owner.prompt_ids

    async def __aiter__(self) -> AsyncIterator[TextOut]:
        """Yields the outputs. The last one has `finish` set. Closing the iterator before that closes the sample."""
        arrived = asyncio.Event()
        self.notify(arrived.set)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                out = self.take()
                yield out
                if out.finish is not None:
                    return
        finally:
            self.close()

    async def result(self) -> TextOut:
        """Waits for the end, and returns all outputs as one. Cancelling it closes the sample."""
        return joined([out async for out in self])

    def notify(self, reader: Callable[[], object]) -> None:
        """Sets the function to call when an output arrives and no earlier one waits for `take`."""
        self._notify = reader
        if self._waiting:
            reader()

    def take(self) -> TextOut:
        """All outputs since the last call, as one."""
        out = joined(self._waiting)
        self._waiting = []
        return out

    def abort(self) -> None:
        """Ask the engine to stop. The last output has all tokens so far, and follows at once or after the current step.
        Does nothing if the sample has ended."""
        if self.is_over or self._is_stopped:
            return
        if not self._is_sent:
            self._end_aborted()
            return
        self._stop()
        self._timeout = asyncio.get_running_loop().call_later(ABORT_TIMEOUT_S, self._end_aborted)

    def close(self) -> None:
        """Ends the sample without waiting for the engine: it is no longer read. Does nothing if it has ended."""
        if self.is_over:
            return
        if self._is_sent and not self._is_stopped:
            self._stop()
        self._end(AbortFinish(_ABORTED))

    def fail(self, error: TercetError) -> None:
        """Ends the sample with this error. Earlier outputs stay."""
        if not self.is_over:
            self._end(AbortFinish.of(error))

    # The TokenizerManager's side

    @property
    def is_sent(self) -> bool:
        """The engine has the sample."""
        return self._is_sent

    @property
    def waits_for_engine(self) -> bool:
        """It has a request for the engine, and the engine does not have it."""
        return self.request is not None and not self._is_sent and not self.is_over

    @property
    def waits_to_begin(self) -> bool:
        """It waits for the engine, and no engine has had it."""
        return self.waits_for_engine and not self.num_recoveries

    def hold(self, request: GenerateReq, age_s: float = 0.0) -> None:
        """Sets the request for the engine. It is sent now (`mark_sent`), or after a restart of the engine.

        `age_s`: how long ago another server process sent it.
        """
        assert not self._is_sent
        self.request = request
        self._submitted = time.monotonic() - age_s

    def mark_sent(self, now: float = 0.0) -> None:
        """The engine has the request now. `now`: on the clock of `waits_since`, if this process restarts the engine."""
        assert not self._is_sent
        self._is_sent = True
        self._sent_at = now

    def lose(self, begun: Container[str], now: float) -> bool:
        """The engine has died. Returns whether it had the sample, which then waits for the next engine.

        `begun`: the keys of samples that had their first step (see `Journal.begun`). `now`: as of `mark_sent`.
        A sample that is being aborted ends here, with the tokens so far.
        """
        if not self._is_sent or self.is_over:
            return False
        self._is_sent = False
        if self._is_stopped:
            self._end_aborted()
            return False
        self.num_recoveries += 1
        self.has_begun |= self.key in begun
        if self.output_ids:
            since_first_token_s = time.monotonic() - self._submitted - (self.first_token_s or 0.0)
            self.ran_s += max(min(since_first_token_s, now - self._sent_at), 0.0)
        return True

    def resumption(self) -> GenerateReq:
        """The request for an engine, with the tokens so far, after which the engine continues."""
        assert self.request is not None
        if not self.num_recoveries:
            return self.request
        counts = self._counts
        resumed = Resumed(list(self.output_ids), None, counts.num_retractions, ran_s=self.ran_s)
        if self.output_ids:
            resumed = msgspec.structs.replace(
                resumed,
                cached_tokens=counts.cached_tokens,
                host_tokens=counts.host_tokens,
                storage_tokens=counts.storage_tokens,
            )
        return msgspec.structs.replace(self.request, resumed=resumed)

    def restore(self, out: TextOut, num_recoveries: int, first_token_s: float | None) -> None:
        """Adds an output that another server process has received. Must be called before the sample is sent."""
        self.num_recoveries = num_recoveries
        Generation.push(self, out)
        self.first_token_s = first_token_s

    def push(self, out: TextOut) -> None:
        """Called by the TokenizerManager with each output."""
        if self.on_queue_full is not None and isinstance(error_of(out.finish), QueueFull):
            self._is_sent = False
            self.request = None
            if self._is_stopped:
                self.close()
            else:
                self.on_queue_full()
            return
        if out.counts.completion_tokens >= self._counts.completion_tokens:
            self._counts = out.counts
        else:  # an end that was not decided by the scheduler knows no counts
            out = TextOut(tokens=msgspec.structs.replace(out.tokens, counts=self._counts), text=out.text)
        now = time.monotonic()
        if self.first_token_s is None and out.counts.completion_tokens:
            self.first_token_s = now - self._submitted
        if out.token_ids:
            self.output_ids += out.token_ids
        self._waiting.append(out)
        if out.finish is not None:
            self.finished_s = now - self._submitted
            self._on_last_output(out.finish)
        num_waiting = len(self._waiting)
        if num_waiting == 1:
            self._notify()
        elif num_waiting > MAX_BACKLOG:
            self._waiting = [joined(self._waiting)]

    def _on_last_output(self, finish: FinishReason) -> None:
        self.is_over = True
        self.is_complete = not isinstance(finish, AbortFinish)
        if self._timeout is not None:
            self._timeout.cancel()
        if error_of(finish) is not None and self._is_sent and not self._is_stopped:
            self._stop()  # it may have failed in the detokenizer while the scheduler continues it
        self._owner.on_end(self)
        if self.on_end is not None:
            self.on_end()

    def _stop(self) -> None:
        self._is_stopped = True
        self._owner.stop(self)

    def _end_aborted(self) -> None:
        """Ends the sample with the tokens so far and their whole text, because no engine will complete it."""
        self._end(AbortFinish(_ABORTED), self._owner.held_text(self) if self.output_ids else "")

    def _end(self, finish: AbortFinish, text: str = "") -> None:
        counts = Counts(len(self.prompt_ids))
        self.push(TextOut(tokens=TokenOut(rid=self.key, token_ids=[], finish=finish, counts=counts), text=text))


def _nobody() -> None:
    """Does nothing: no reader is set."""


class OutputReader:
    """Reads the outputs of several samples. Each wake-up of its task returns all new outputs of all samples."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._ready: list[int] = []
        self._num_unfinished = len(generations)
        self._wake: asyncio.Future[None] | None = None
        for place, generation in enumerate(generations):
            generation.notify(functools.partial(self._on_output, place))

    async def next(self) -> list[tuple[int, TextOut]]:
        """At most one output of each sample, with the index of its sample. Empty after the last output.

        A slow reader gets fewer and larger outputs.
        """
        if not self._ready:
            if not self._num_unfinished:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        places, self._ready = self._ready, []
        outs = [(place, self._generations[place].take()) for place in places]
        self._num_unfinished -= sum(out.finish is not None for _, out in outs)
        return outs

    def _on_output(self, place: int) -> None:
        self._ready.append(place)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def error_of(finish: FinishReason | None) -> TercetError | None:
    """The error behind a finish reason. None for a regular end, and for an abort by the client."""
    if not isinstance(finish, AbortFinish) or finish.status_code is None:
        return None
    error = BY_TYPE.get(finish.err_type or "", TercetError)(finish.message)
    if isinstance(finish.retry_after_s, int):
        error.retry_after_s = finish.retry_after_s
    if isinstance(finish.param, str):
        error.param = finish.param
    return error
