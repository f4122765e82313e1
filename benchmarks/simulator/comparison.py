"""Compares decisions: gives a scheduler the recorded messages in the recorded turns, and looks at each of its steps."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np

from ...managers.engine_view import StepLog
from ...managers.schedule_batch import ScheduleBatch
from ...managers.scheduler import InFlight
from ...managers.scheduler_io import SchedulerIO
from ...managers.scheduler_process import build_scheduler
from ...managers.step_cost import StepCost, StepShape
from ...managers.token_gap import TokenGapBound
from ...model_executor.step import StepInputs
from ...srt.io_struct import (
    AbortReq,
    FlushCacheReq,
    GenerateReq,
    RetainReq,
    ToDetokenizer,
    ToScheduler,
    ToTokenizer,
)
from ...srt.request_options import RequestOptions
from ...srt.sampling_params import SamplingParams
from ...srt.schedule_record import Abort, Arrival, Flush, Retain
from .cost import DeviceProfile
from .device import DeviceSettings, SimClock, SimDevice, eos_id
from .replay import UNENDED, RecordedStep, Replay
from .simulation import device_settings


@dataclass
class Comparison:
    """The decisions of a recording beside those of this scheduler."""

    num_recorded: int
    num_equal: int = 0
    difference: str | None = None
    """The first different step, in words. Later steps follow from it, so they are not compared."""


@dataclass(slots=True)
class _Request:
    """What the device knows of a recorded request."""

    recorded_ids: np.ndarray | None
    num_output_tokens: int = UNENDED
    row: int = 0
    last_token_s: float = float("nan")
    was_admitted: bool = False


class _Different(Exception):
    """The next step is not the recorded one. The message says how."""


def compare(replay: Replay) -> Comparison:
    """Runs this scheduler on the messages of the recording.

    Log probabilities, embeddings, hidden states and grammars are left out: a recording with such requests may differ
    for that reason.
    """
    return _Comparing(replay).run()


def learned(replay: Replay, number: int) -> TokenGapBound | None:
    """What the recorded planner had learned about the times of steps when the request of this number arrived.

    None if its settings have no bound on token gaps. Raises ValueError if this scheduler decides otherwise before that.
    """
    comparing = _Comparing(replay)
    try:
        comparing.run_until(replay.arrivals()[number].turn)
    except _Different as different:
        raise ValueError(f"the scheduler does not decide as recorded: {different}") from None
    return comparing.gap


class _Comparing:
    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._turn = 0
        self._clock = _Clock()
        self._requests: dict[int, _Request] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._eos_id = eos_id(replay.start.vocab_size)
        server_args = replay.server_args()
        self._device = _Device(replay, self._clock, self._requests, device_settings(server_args))
        self._scheduler = build_scheduler(
            server_args,
            dataclasses.replace(replay.model_config(), eos_token_ids=(self._eos_id,)),
            self._device,
            None,
            SchedulerIO(self, self, _Nobody(), self._clock),
            self._clock,
            compile_grammars_here=True,
            slot_of=lambda ref: 1,  # the device computes nothing
            cost_depth=replay.start.equal_cost_depth,
            step_log=_RecordedTimes(replay, self._clock),
        )

    @property
    def gap(self) -> TokenGapBound | None:
        return self._scheduler.planner.gap

    def run(self) -> Comparison:
        script = self._replay.script
        result = Comparison(len(script.steps))
        try:
            self.run_until(max(script.steps[-1].turn, *script.messages) + 2)
        except _Different as different:
            result.difference = str(different)
        result.num_equal = self._device.num_equal
        if result.num_equal < result.num_recorded and result.difference is None:
            result.difference = f"the replay ended after {result.num_equal} steps"
        return result

    def run_until(self, end: int) -> None:
        """Runs the turns before `end`, as far as steps are recorded. Raises _Different."""
        script = self._replay.script
        turns = sorted(script.messages)
        in_flight: InFlight | None = None
        while self._device.num_steps < len(script.steps):
            if in_flight is None and not self._scheduler.queues.is_busy:
                self._turn = next((turn for turn in turns if turn > self._turn), end)
            else:
                self._turn += 1
            if self._turn >= end:
                return
            in_flight = self._scheduler.turn(in_flight)

    # The inbox

    def drain(self) -> list[ToScheduler]:
        messages = self._replay.script.messages.get(self._turn, ())
        if messages:
            self._clock.advance_to(messages[0].at_s)
        return [self._message(message) for message in messages]

    def wait(self, timeout_s: float) -> bool:
        return True

    def _message(self, message: Arrival | Abort | Retain | Flush) -> ToScheduler:
        if isinstance(message, Flush):
            return FlushCacheReq(0)
        if isinstance(message, Retain):
            arrival, (output_ids, _) = self._arrivals[message.number], self._replay.output(message.number)
            assert output_ids is not None
            ids = np.concatenate([self._replay.recording.ids(arrival.ids), output_ids])
            return RetainReq(str(message.number), ids.tobytes(), _options(arrival, None), message.seconds)
        if isinstance(message, Abort):
            return AbortReq(None if message.number is None else str(message.number))
        self._arrivals[message.number] = message
        output_ids, stop_id = self._replay.output(message.number)
        self._requests[message.number] = _Request(output_ids)
        prompt_ids = self._replay.recording.ids(message.ids)
        return GenerateReq(str(message.number), prompt_ids.tobytes(), _options(message, stop_id), message.resumed)

    # The outbox

    def send(self, message: ToDetokenizer, /) -> None:
        for out in message.outs:
            if out.finish is not None:
                self._requests.pop(int(out.rid), None)


class _Device(SimDevice):
    """Gives each step the times of the recorded one, if it is the same step."""

    def __init__(
        self, replay: Replay, clock: SimClock, requests: dict[int, _Request], settings: DeviceSettings
    ) -> None:
        free = DeviceProfile.of("none", StepCost(), is_asynchronous=replay.start.is_asynchronous)
        super().__init__(
            settings,
            max_total_num_tokens=replay.start.max_total_num_tokens,
            vocab_size=replay.start.vocab_size,
            profile=free,
            clock=clock,
            requests=requests,
            watcher=_Nobody(),
        )
        self._steps = replay.script.steps
        self.num_equal = 0

    def _times(self, step: StepInputs, shape: StepShape) -> tuple[float, float]:
        recorded = self._steps[self.num_steps]
        if not recorded.is_like(step):
            raise _Different(
                f"step {self.num_steps + 1} of turn {recorded.turn} was {_text_of(recorded)}; it is now "
                f"{_text(step.rows, step.seq_lens, step.extend_lens)}"
            )
        self.num_equal += 1
        self._clock.advance_to(recorded.start_s)
        return recorded.start_s, recorded.end_s


class _Clock(SimClock):
    """Each read is later than the one before, as on a real clock. So retentions of one turn end in their order."""

    def __call__(self) -> float:
        self.now_s += 1e-7
        return self.now_s


class _RecordedTimes(StepLog):
    """Gives the planner the recorded seconds of each step, so that it learns what the recorded one has learned."""

    def __init__(self, replay: Replay, clock: SimClock) -> None:
        super().__init__(clock)
        self._seconds = (seconds for _, seconds in replay.timed())

    def on_result(self, batch: ScheduleBatch) -> float:
        seconds = super().on_result(batch)
        return next(self._seconds) if batch.reqs else seconds


class _Nobody:
    def send(self, message: ToTokenizer, /) -> None:
        """Drops heartbeats."""

    def on_admission(self, number: int, num_cached: int) -> None:
        """The comparison counts no hits."""

    def on_token_gaps(self, gaps_s: np.ndarray) -> None:
        """The comparison measures no gaps."""

    def on_step(self, shape: StepShape, start_s: float, end_s: float) -> None:
        """The device itself compares steps."""


def _options(arrival: Arrival, stop_id: int | None) -> RequestOptions:
    """The recorded options, as far as the order of requests depends on them. `stop_id`: the token that ends it."""
    recorded = arrival.options.sampling
    sampling = SamplingParams(
        max_new_tokens=recorded.max_new_tokens,
        sampling_seed=arrival.number,
        temperature=0.0,
        ignore_eos=recorded.ignore_eos,
        stop_token_ids=None if stop_id is None else [stop_id],
    )
    return msgspec.structs.replace(
        arrival.options, sampling=sampling, logprobs=None, pooling=None, return_hidden_states=False
    )


def _text_of(step: RecordedStep) -> str:
    return _text(step.rows, step.seq_lens, step.extend_lens)


def _text(rows: np.ndarray, seq_lens: np.ndarray, extend_lens: np.ndarray | None) -> str:
    """A step in words, with its first rows."""
    shown = 8
    parts = [
        f"row {row} to {length}" + ("" if extend_lens is None else f" (+{new})")
        for row, length, new in zip(
            rows[:shown].tolist(),
            seq_lens[:shown].tolist(),
            (seq_lens if extend_lens is None else extend_lens)[:shown].tolist(),
            strict=True,
        )
    ]
    more = f" and {len(rows) - shown} more" if len(rows) > shown else ""
    return f"a {'decode' if extend_lens is None else 'extend'} step of {', '.join(parts)}{more}"
