"""Replays a recording of `--record-schedule`: compares decisions, fits the cost of steps, and repeats the traffic."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ...managers.step_cost import PRIOR, StepShape
from ...model_executor.step import ForwardMode, StepInputs
from ...srt.io_struct import AbortFinish, StopFinish
from ...srt.model_files.model_config import ModelConfig
from ...srt.schedule_record import Abort, Arrival, End, Flush, Record, Recording, Retain, Start, Step
from ...srt.server_args import ServerArgs
from ..presets import load_shape
from .cost import DeviceProfile
from .device import eos_id
from .scatter import Scatter
from .traffic import SimRequest
from .whole_fit import fit_cost

UNENDED = 1 << 30
"""Output tokens of a request whose client leaves."""


@dataclass(frozen=True)
class RecordedStep:
    """A step of a recording, complete."""

    turn: int
    start_s: float
    end_s: float
    num_decodes: int
    rows: np.ndarray
    seq_lens: np.ndarray
    extend_lens: np.ndarray | None

    @property
    def mode(self) -> ForwardMode:
        return ForwardMode.DECODE if self.extend_lens is None else ForwardMode.EXTEND

    @property
    def shape(self) -> StepShape:
        num_tokens = len(self.rows) if self.extend_lens is None else int(self.extend_lens.sum())
        inputs = StepInputs(
            self.mode, self.rows, self.seq_lens, np.empty(num_tokens, np.int32), extend_lens=self.extend_lens
        )
        return StepShape.of(inputs, self.num_decodes)

    def is_like(self, step: StepInputs) -> bool:
        """Whether a planned step has the same rows and tokens."""
        lens = step.extend_lens
        return (
            np.array_equal(self.rows, step.rows)
            and np.array_equal(self.seq_lens, step.seq_lens)
            and (lens is None) == (self.extend_lens is None)
            and (lens is None or self.extend_lens is None or np.array_equal(self.extend_lens, lens))
        )


@dataclass
class Script:
    """A recording in memory."""

    messages: dict[int, list[Arrival | Abort | Retain | Flush]] = field(default_factory=lambda: defaultdict(list))
    """By the turn in which they were received, in the order of turns."""
    steps: list[RecordedStep] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
    """By the number of the request."""
    tool_calls: set[int] = field(default_factory=set)
    """The numbers of the requests that were retained after a tool call."""


@dataclass(frozen=True)
class Measured:
    """The figures of a recorded run, seen from the scheduler."""

    num_completed: int
    output_throughput: float
    median_ttft_s: float
    duration_s: float


class Replay:
    """A recording, and what can be learned from it. It is read into memory."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.start = recording.start
        self.script = _read(recording.records())
        if not self.script.steps:
            raise ValueError("the recording has no step")

    @property
    def num_requests(self) -> int:
        return sum(isinstance(message, Arrival) for batch in self.script.messages.values() for message in batch)

    def server_args(self) -> ServerArgs:
        """The settings of the recorded scheduler, as far as this version knows them."""
        known = {one.name for one in dataclasses.fields(ServerArgs)}
        start = self.start
        given = {name: value for name, value in start.server_args.items() if name in known}
        if start.version == 1:  # None: no bound; 0: automatic
            bound = given.get("max_itl_ms")
            given["max_itl_ms"] = "none" if bound is None else bound or "auto"
        limits = {
            "page_size": start.page_size,
            "context_length": start.context_len,
            "max_running_requests": start.max_running_requests,
            "max_saved_states": start.max_saved_states,
            "max_prefill_tokens": start.max_prefill_tokens,
            "chunked_prefill_size": start.chunked_prefill_size,
            "max_total_tokens": start.max_total_num_tokens,
        }
        without = {
            "skip_tokenizer_init": True,
            "kv_events_config": None,
            "lora_paths": None,
            "lora_dir": None,
            "record_schedule": None,
            "explain_schedule": None,
        }
        no_tiers = {"enable_hierarchical_cache": False, "hicache_size": None, "hicache_storage_dir": None}
        return ServerArgs.from_dict({**given, **limits, **without, **no_tiers})

    @property
    def had_tiers(self) -> bool:
        """The recorded server had host memory or files for KV. A replay has neither."""
        return bool(self.start.server_args.get("enable_hierarchical_cache"))

    def model_config(self) -> ModelConfig:
        """The recorded model, as far as a scheduler knows it."""
        return dataclasses.replace(
            load_shape("smollm2-135m"), vocab_size=self.start.vocab_size, context_len=self.start.context_len
        )

    def fit(self, name: str, since: int = 0) -> DeviceProfile:
        """The cost of steps that fits the recorded times best. `since`: the number of a request; earlier steps than its
        arrival are left out."""
        start_s = self._start_s(since)
        shapes, seconds = [], []
        is_new = {ForwardMode.EXTEND: True, ForwardMode.DECODE: True}
        for step, step_s in self.timed():
            # The first step of each kind may compile kernels or touch memory for the first time.
            is_first, is_new[step.mode] = is_new[step.mode], False
            if step.start_s >= start_s and not is_first:
                shapes.append(step.shape)
                seconds.append(step_s)
        cost = fit_cost(shapes, seconds) if shapes else PRIOR
        return DeviceProfile.of(name, cost, host_s=self.host_s(start_s), is_asynchronous=self.start.is_asynchronous)

    def scatter(self, profile: DeviceProfile, since: int) -> Scatter:
        """The scatter of the steps after the arrival of the request of this number, around the cost of `profile`."""
        start_s, ratios = self._start_s(since), {ForwardMode.EXTEND: list[float](), ForwardMode.DECODE: list[float]()}
        for step, step_s in self.timed():
            cost_s = profile.cost.seconds(step.shape)
            if step.start_s >= start_s and cost_s > 0:
                ratios[step.mode].append(step_s / cost_s)
        return Scatter(ratios[ForwardMode.EXTEND], ratios[ForwardMode.DECODE])

    def _start_s(self, number: int) -> float:
        """When a request arrived; 0 for one that is not recorded."""
        return self.arrivals()[number].at_s if number in self.arrivals() else 0.0

    def timed(self) -> Iterator[tuple[RecordedStep, float]]:
        """Each step, with the seconds that the device worked on it."""
        last_end_s = -np.inf
        for step in self.script.steps:
            yield step, step.end_s - max(step.start_s, last_end_s)
            last_end_s = step.end_s

    def host_s(self, since_s: float) -> float:
        """Mean seconds from the end of a step to the launch of the next one; 0 if they overlap."""
        steps = self.script.steps
        gaps = [
            after.start_s - before.end_s
            for before, after in itertools.pairwise(steps)
            if after.turn == before.turn + 1 and before.start_s >= since_s
        ]
        return max(float(np.mean(gaps)), 0.0) if gaps and not self.start.is_asynchronous else 0.0

    def requests(self) -> Iterator[SimRequest]:
        """The recorded requests that ended, at their times. The first one arrives at 0 s."""
        first_s = None
        for batch in self.script.messages.values():
            for message in batch:
                if not isinstance(message, Arrival) or message.number not in self.script.ends:
                    continue
                end = self.script.ends[message.number]
                first_s = message.at_s if first_s is None else first_s
                output_ids, stop_id = self.output(message.number)
                assert output_ids is not None
                left = isinstance(end.finish, AbortFinish) and end.finish.err_type is None
                yield SimRequest(
                    message.at_s - first_s,
                    self.recording.ids(message.ids),
                    UNENDED if left else max(len(output_ids), 1),
                    message.options.sampling.max_new_tokens or 0,
                    message.options.tenant,
                    aborts_after_s=end.at_s - message.at_s if left else None,
                    options=message.options,
                    # The device ends any other output with a token of its own, whatever the limits of this run.
                    recorded_ids=output_ids if left or stop_id is not None else output_ids[:-1],
                    stop_id=stop_id,
                    ends_in_tool_call=message.number in self.script.tool_calls,
                )

    def output(self, number: int) -> tuple[np.ndarray | None, int | None]:
        """The output of a request, and the token that stops it. None where the recording has none.

        The cache may have the last token, too: with overlap, or if it was a draft. So that one stops the request. If an
        earlier one is the same, a token that is not in the vocabulary stands for the last one.
        """
        end = self.script.ends.get(number)
        if end is None:
            return None, None
        ids = self.recording.ids(end.ids)
        if not isinstance(end.finish, StopFinish) or not len(ids):
            return ids, None
        if ids[-1] in ids[:-1]:
            ids = np.append(ids[:-1], np.int32(eos_id(self.start.vocab_size)))
        return ids, int(ids[-1])

    def arrivals(self) -> dict[int, Arrival]:
        """The requests by number."""
        return {one.number: one for batch in self.script.messages.values() for one in batch if isinstance(one, Arrival)}

    def measured(self) -> Measured:
        """The figures of the recorded run itself. Requests whose arrival is not recorded are left out."""
        arrivals = self.arrivals()
        ends = [end for end in self.script.ends.values() if end.number in arrivals]
        done = [end for end in ends if not isinstance(end.finish, AbortFinish) and end.first_token_s is not None]
        if not done:
            raise ValueError("the recording has no request that ended by itself")
        duration_s = max(end.at_s for end in ends) - min(arrival.at_s for arrival in arrivals.values())
        num_tokens = sum(len(self.recording.ids(end.ids)) for end in ends)
        ttfts = [(end.first_token_s or 0.0) - arrivals[end.number].at_s for end in done]
        return Measured(len(done), num_tokens / duration_s, float(np.median(ttfts)), duration_s)


def _read(records: Iterator[Record]) -> Script:
    script = Script()
    for record in records:
        if isinstance(record, Step):
            script.steps.append(_complete(record, script.steps))
        elif isinstance(record, End):
            script.ends[record.number] = record
        elif not isinstance(record, Start):
            if isinstance(record, Retain):
                script.tool_calls.add(record.number)
            script.messages[record.turn].append(record)
    return script


def _complete(step: Step, before: list[RecordedStep]) -> RecordedStep:
    if step.rows is None:
        if not before:
            raise ValueError("the recording begins with a step that continues another one")
        return RecordedStep(
            step.turn, step.start_s, step.end_s, step.num_decodes, before[-1].rows, before[-1].seq_lens + 1, None
        )
    extend_lens = None if step.extend_lens is None else np.frombuffer(step.extend_lens, np.int32)
    rows, seq_lens = np.frombuffer(step.rows, np.int32), np.frombuffer(step.seq_lens, np.int32)
    return RecordedStep(step.turn, step.start_s, step.end_s, step.num_decodes, rows, seq_lens, extend_lens)
