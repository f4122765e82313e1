"""The processor time of a scheduler, by phase: the real scheduler and links, and a device that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..managers.engine_view import StepLog
from ..managers.schedule_batch import ScheduleBatch
from ..managers.scheduler import InFlight, Scheduler
from ..managers.scheduler_io import Inbox, Outbox
from ..managers.step_cost import StepShape
from ..model_executor.step import StepInputs, StepOutput, TokenMasks
from ..srt.io_struct import BrokenMessage, ToDetokenizer, ToScheduler
from ..srt.logprobs import Logprobs
from .simulator.cost import DeviceProfile
from .simulator.device import DeviceSettings, shape_of

T = TypeVar("T")


class Phase(IntEnum):
    """The parts of a turn of the scheduler. The last three are inside the others, which exclude them."""

    OUTSIDE = 0
    """Not the scheduler: the device, the links' other ends, the benchmark."""
    RECEIVE = 1
    PLAN = 2
    """Handles messages and plans the next step."""
    LAUNCH = 3
    """Counts the launched step."""
    RESULTS = 4
    """Appends tokens, tests for ends, makes outputs."""
    SEND = 5
    """Encodes the outputs and writes them to the link."""
    REST = 6
    KV = 7
    """Allocates and frees slots and rows."""
    CACHE = 8
    """Looks up, inserts, locks and evicts prefixes, also in host memory, and orders the queue."""
    OBSERVE = 9
    """Counters, the step journal, the log of steps, the recording, the explanation of waits, and KV events."""


_CALLS = {
    "kv": (Phase.KV, ("decode", "has_room_for_decode", "extend", "admit", "share", "release")),
    "kv.cache": (
        Phase.CACHE,
        ("match", "insert", "lock", "unlock", "move_lock", "evict", "is_discarded"),
    ),
    # It looks up each waiting request. To time each look-up would take longer than the look-ups.
    "planner._policy": (Phase.CACHE, ("order",)),
    "kv.tiers": (Phase.CACHE, ("end_of", "admit", "save", "take_copies", "on_copied")),
    "_metrics": (Phase.OBSERVE, ("on_arrival", "on_launch", "on_result", "on_finish")),
    "_step_log": (Phase.OBSERVE, ("on_launch", "on_result")),
    "_journal": (Phase.OBSERVE, ("begin", "end")),
    "planner": (Phase.OBSERVE, ("_count_time", "_note_admissions", "_find_limit")),
    "kv._events": (Phase.OBSERVE, ("stored", "split", "removed")),
    "_kv_events": (Phase.OBSERVE, ("flush",)),
}
"""Methods of parts of a scheduler that are timed. The planner has its own only with `--explain-schedule`.
`kv.tiers` may be None, and the last two parts are None without KV events."""
_NUM_CALIBRATIONS = 10_000
RECORDER_CALLS = ("on_turn", "on_step", "on_outputs")


class PhaseTimer:
    """Counts the processor time of this thread for one phase at a time. Other processes on the core do not count."""

    def __init__(self, clock_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock_ns = clock_ns
        self._spent_ns = [0] * len(Phase)
        self._phase = Phase.OUTSIDE
        self._since_ns = clock_ns()
        self._own_ns = 0
        """What a call of `enter` takes, which counts for no phase."""
        began_ns = self._since_ns
        for _ in range(_NUM_CALIBRATIONS):
            self.enter(Phase.OUTSIDE)
        self._own_ns = (self._since_ns - began_ns) // _NUM_CALIBRATIONS

    def enter(self, phase: Phase) -> Phase:
        """Time counts for `phase` from now on. Returns the phase before."""
        now_ns = self._clock_ns()
        before, self._phase = self._phase, phase
        self._spent_ns[before] += now_ns - self._since_ns - self._own_ns
        self._since_ns = now_ns
        return before

    def wrap(self, part: object, names: Sequence[str], phase: Phase) -> None:
        """The time of these methods of an object, as far as it has them, counts for `phase`."""
        for name in names:
            if hasattr(part, name):
                setattr(part, name, self._timed(getattr(part, name), phase))

    def _timed(self, call: Callable[..., T], phase: Phase) -> Callable[..., T]:
        def timed_call(*args: Any, **kwargs: Any) -> T:
            before = self.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.enter(before)

        return timed_call

    def take(self) -> list[int]:
        """Nanoseconds of each phase since the last call."""
        spent, self._spent_ns = self._spent_ns, [0] * len(Phase)
        return spent


class TimedInbox:
    """What follows the messages is planning."""

    def __init__(self, inbox: Inbox, timer: PhaseTimer) -> None:
        self._inbox = inbox
        self._timer = timer
        self.num_sent = 0
        """Messages that were sent and not received. The next turn gets all of them, so each run is the same."""

    def drain(self) -> Sequence[ToScheduler | BrokenMessage]:
        messages = [*self._inbox.drain()]
        while len(messages) < self.num_sent:
            before = self._timer.enter(Phase.OUTSIDE)
            self._inbox.wait(1.0)
            self._timer.enter(before)
            messages += self._inbox.drain()
        self.num_sent = 0
        self._timer.enter(Phase.PLAN)
        return messages

    def wait(self, timeout_s: float) -> bool:
        return self._inbox.wait(timeout_s)


class TimedOutbox:
    def __init__(self, outbox: Outbox[ToDetokenizer], timer: PhaseTimer) -> None:
        self._outbox = outbox
        self._timer = timer
        self.num_ended = 0
        """Requests that have ended since somebody has set this to 0."""

    def send(self, message: ToDetokenizer, /) -> None:
        self._timer.enter(Phase.SEND)
        self._outbox.send(message)
        self._timer.enter(Phase.OUTSIDE)
        self.num_ended += sum(out.finish is not None for out in message.outs)
        self._timer.enter(Phase.REST)


class NullDevice:
    """A `Runner` that computes nothing. Its tokens are random, but no tokens of `excluded_ids`."""

    def __init__(
        self,
        settings: DeviceSettings,
        *,
        max_total_num_tokens: int,
        vocab_size: int,
        excluded_ids: Sequence[int],
        is_asynchronous: bool,
        timer: PhaseTimer,
    ) -> None:
        self.settings = settings
        self.max_total_num_tokens = max_total_num_tokens
        self.is_asynchronous = is_asynchronous
        self.last_step: StepInputs | None = None
        """The step that was launched since somebody has set this to None."""
        self.timer = timer
        self._rng = np.random.default_rng(0)
        self._ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), excluded_ids)
        self._num_top: dict[int, int] = {}
        """Rows with log probabilities, and how many of the most probable tokens they list."""

    def load_adapter(self, slot: int, path: str) -> str:
        """Adapters change nothing here."""
        return path

    def unload_adapter(self, slot: int) -> None:
        """As `load_adapter`."""

    def launch(self, step: StepInputs) -> NullStep:
        self.timer.enter(Phase.OUTSIDE)
        self.last_step = step
        for new in step.new_rows:
            self._num_top.pop(new.row, None)
            if new.logprobs is not None:
                self._num_top[new.row] = new.logprobs.top_logprobs_num
        rows = step.rows if step.sampled is None else step.rows[step.sampled]
        tops = {place: self._num_top[row] for place, row in enumerate(rows.tolist()) if row in self._num_top}
        logprobs = {place: Logprobs(bytes(4), bytes(4 * top), bytes(4 * top)) for place, top in tops.items()}
        launched = NullStep(StepOutput(self._rng.choice(self._ids, len(rows)), logprobs=logprobs), self.timer)
        self.timer.enter(Phase.LAUNCH)
        return launched


class NullStep:
    def __init__(self, output: StepOutput, timer: PhaseTimer) -> None:
        self._output = output
        self._timer = timer

    def sample(self, masks: TokenMasks | None = None) -> None:
        """The tokens are chosen already."""

    def wait(self) -> StepOutput:
        self._timer.enter(Phase.RESULTS)
        return self._output


def tell_planner(step_log: StepLog, profile: DeviceProfile, timer: PhaseTimer) -> None:
    """From now on, the planner learns the times of the profile, so each round has the same schedule.

    To compute them is no work of a server, so it counts for no phase.
    """
    measure = step_log.on_result

    def on_result(batch: ScheduleBatch) -> float:
        measure(batch)
        before = timer.enter(Phase.OUTSIDE)
        seconds = profile.cost.seconds(StepShape.of(batch.inputs, batch.num_decodes))
        timer.enter(before)
        return seconds

    step_log.on_result = on_result  # type: ignore[method-assign]


class Turn(NamedTuple):
    """A turn of the scheduler that launched a step."""

    shape: StepShape
    spent_ns: list[int]
    """By phase."""


class TimedScheduler:
    """A scheduler on a NullDevice, whose inbox and outbox are timed, too."""

    def __init__(self, scheduler: Scheduler, device: NullDevice) -> None:
        self.scheduler = scheduler
        self._device = device
        self._timer = timer = device.timer
        self._in_flight: InFlight | None = None
        for part, (phase, names) in _CALLS.items():
            timer.wrap(attrgetter(part)(scheduler), names, phase)

    def turns(self) -> Iterator[Turn]:
        """Runs turns of the scheduler for as long as the caller wants more of them."""
        device, timer = self._device, self._timer
        while True:
            device.last_step = None
            timer.enter(Phase.RECEIVE)
            self._in_flight = self.scheduler.turn(self._in_flight)
            timer.enter(Phase.OUTSIDE)
            spent_ns = timer.take()
            if device.last_step is not None:
                yield Turn(shape_of(device.last_step), spent_ns)
