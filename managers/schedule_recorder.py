"""Records what a scheduler does, from outside: it stands between the scheduler and its inbox, outbox and step log.

A scheduler that is not recorded has its own inbox, outbox and step log, so recording costs nothing when it is off.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..mem_cache.evict_policy import equal_cost_depth
from ..srt.io_struct import (
    AbortReq,
    BatchTokenOut,
    BrokenMessage,
    FlushCacheReq,
    GenerateReq,
    RetainReq,
    ToDetokenizer,
    ToScheduler,
    unpack_ids,
)
from ..srt.model_files.model_config import ModelConfig
from ..srt.schedule_record import VERSION, Abort, Arrival, End, Flush, Retain, ScheduleFile, Start, Step, narrow_ids
from ..srt.server_args import ServerArgs
from .engine_runner import EngineRunner
from .engine_view import StepLog
from .req import Req
from .schedule_batch import ScheduleBatch
from .scheduler_io import Inbox, Outbox

_MAX_ENDED = 4096
"""Requests that are remembered after their end, in case that they were tool calls."""


@dataclass(slots=True)
class _Live:
    """A request that has arrived and not ended."""

    number: int
    resumed_ids: list[int]
    req: Req | None = None
    """It has all output tokens. None: it has not started."""
    first_token_s: float | None = None


class SchedulerEnds(NamedTuple):
    """What a scheduler is connected to."""

    inbox: Inbox
    outbox: Outbox[ToDetokenizer]
    step_log: StepLog


class ScheduleRecorder:
    """Writes the records of one scheduler. Wrap its ends before it is built."""

    def __init__(
        self,
        path: Path,
        server_args: ServerArgs,
        config: ModelConfig,
        runner: EngineRunner,
        clock: Callable[[], float],
        *,
        is_restart: bool = False,
    ) -> None:
        """`runner`: its limits are recorded. `clock`: that of the scheduler. `is_restart`: if the file cannot be made,
        the recording begins later, because a full disk must not end the engine.

        Raises ValueError if the file cannot be made.
        """
        limits = runner.settings
        start = Start(
            version=VERSION,
            run=secrets.token_hex(8),
            part=0,
            server_args=server_args.without_secrets(),
            page_size=limits.page_size,
            context_len=limits.context_len,
            max_running_requests=limits.max_running_requests,
            max_prefill_tokens=limits.max_prefill_tokens,
            chunked_prefill_size=limits.chunked_prefill_size,
            max_total_num_tokens=runner.max_total_num_tokens,
            vocab_size=config.vocab_size,
            is_asynchronous=runner.is_asynchronous,
            equal_cost_depth=equal_cost_depth(config),
            max_saved_states=limits.max_saved_states,
        )
        try:
            self._file = ScheduleFile(path, start, may_begin_later=is_restart)
        except OSError as error:
            raise ValueError(f"--record-schedule {path}: {error.strerror or error}") from error
        self._clock = clock
        self._vocab_size = config.vocab_size
        self._turn = 0
        self._num_arrivals = 0
        self._live: dict[str, _Live] = {}
        """Live requests, by rid."""
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Numbers of the last requests that have ended, by rid."""
        self._last: tuple[int, bytes, bytes] | None = None
        """Of the last step: the part of the recording that has it, its rows, and the lengths that they have next."""

    def wrap(self, ends: SchedulerEnds) -> SchedulerEnds:
        """The same ends, through the recorder. The step log is another one, which also measures by `clock`."""
        return SchedulerEnds(
            _RecordingInbox(ends.inbox, self), _RecordingOutbox(ends.outbox, self), _RecordingStepLog(self)
        )

    def close(self) -> None:
        self._file.close()

    @property
    def turn(self) -> int:
        return self._turn

    def now_s(self) -> float:
        return self._clock()

    def on_turn(self, messages: Sequence[ToScheduler | BrokenMessage]) -> None:
        """A turn begins with these messages."""
        self._turn += 1
        now_s = self._clock() if messages else 0.0
        for message in messages:
            if isinstance(message, GenerateReq):
                number = self._num_arrivals
                self._num_arrivals += 1
                resumed = message.resumed
                self._live[message.rid] = _Live(number, [] if resumed is None else list(resumed.output_ids))
                ids = narrow_ids(unpack_ids(message.input_ids), self._vocab_size)
                self._file.write(Arrival(self._turn, now_s, number, ids, message.options, resumed), now_s)
            elif isinstance(message, AbortReq):
                if message.rid is None:
                    self._file.write(Abort(self._turn, now_s, None), now_s)
                elif message.rid in self._live:
                    self._file.write(Abort(self._turn, now_s, self._live[message.rid].number), now_s)
            elif isinstance(message, RetainReq):
                number_of = self._ended.get(message.rid)
                if number_of is not None:
                    self._file.write(Retain(self._turn, now_s, number_of, message.seconds), now_s)
            elif isinstance(message, FlushCacheReq):
                self._file.write(Flush(self._turn, now_s), now_s)

    def on_step(self, batch: ScheduleBatch, turn: int, start_s: float, end_s: float) -> None:
        """The tokens of a step are on the host. A step that only copies KV is not recorded: nothing was decided."""
        if not batch.reqs:
            return
        step = batch.inputs
        if step.new_rows:
            for req in batch.reqs[: len(batch.reqs) - batch.num_decodes]:
                live = self._live.get(req.rid)
                if live is not None:
                    live.req = req
        rows, lens = step.rows.tobytes(), step.seq_lens.tobytes()
        part = self._file.part
        # A decode step of the rows of the step before, each with one token more, if its file has that step.
        if step.extend_lens is None and self._last == (part, rows, lens):
            record = Step(turn, start_s, end_s, batch.num_decodes)
        else:
            extend_lens = None if step.extend_lens is None else step.extend_lens.tobytes()
            record = Step(turn, start_s, end_s, batch.num_decodes, rows, lens, extend_lens)
        self._last = part, rows, (step.seq_lens + 1).tobytes()
        self._file.write(record, end_s)

    def on_outputs(self, batch: BatchTokenOut) -> None:
        now_s = self._clock()
        for out in batch.outs:
            live = self._live.get(out.rid)
            if live is None:
                continue
            if out.token_ids and live.first_token_s is None:
                live.first_token_s = now_s
            if out.finish is not None:
                del self._live[out.rid]
                self._ended[out.rid] = live.number
                if len(self._ended) > _MAX_ENDED:
                    self._ended.popitem(last=False)
                output_ids = live.resumed_ids if live.req is None else live.req.output_ids
                ids = narrow_ids(np.array(output_ids, dtype=np.int32), self._vocab_size)
                self._file.write(End(self._turn, now_s, live.number, live.first_token_s, ids, out.finish), now_s)
        if not self._live:
            self._file.flush()


class _RecordingInbox:
    def __init__(self, inbox: Inbox, recorder: ScheduleRecorder) -> None:
        self._inbox = inbox
        self._recorder = recorder

    def drain(self) -> Sequence[ToScheduler | BrokenMessage]:
        messages = self._inbox.drain()
        self._recorder.on_turn(messages)
        return messages

    def wait(self, timeout_s: float) -> bool:
        return self._inbox.wait(timeout_s)


class _RecordingOutbox:
    def __init__(self, outbox: Outbox[ToDetokenizer], recorder: ScheduleRecorder) -> None:
        self._outbox = outbox
        self._recorder = recorder

    def send(self, message: ToDetokenizer, /) -> None:
        self._outbox.send(message)
        self._recorder.on_outputs(message)


class _RecordingStepLog(StepLog):
    """Measures the steps for the scheduler, and records the same times."""

    def __init__(self, recorder: ScheduleRecorder) -> None:
        super().__init__(recorder.now_s)
        self._recorder = recorder
        self._turns: deque[int] = deque()
        """Of the launches of the steps in flight, oldest first."""

    def on_launch(self) -> None:
        self._turns.append(self._recorder.turn)
        super().on_launch()

    def on_result(self, batch: ScheduleBatch) -> float:
        seconds = super().on_result(batch)
        self._recorder.on_step(batch, self._turns.popleft(), self.start_s, self.end_s)
        return seconds
