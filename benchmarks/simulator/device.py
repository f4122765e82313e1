"""The fake device: it computes nothing, returns tokens whose number is known, and says how long each step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...managers.step_cost import StepShape
from ...model_executor.sampling.draft_verification import verify
from ...model_executor.step import FROM_DEVICE, Choices, Int32Array, StepInputs, StepOutput, TokenMasks
from .cost import DeviceProfile
from .scatter import Scatter

_NEVER = np.nan


def eos_id(vocab_size: int) -> int:
    """The token that ends every output: none of the vocabulary, so that it is no other token of a recording."""
    return vocab_size


class SimClock:
    """The simulated time, in seconds after the start."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        """Time never goes back."""
        self.now_s = max(self.now_s, time_s)


@dataclass(frozen=True)
class DeviceSettings:
    """The settings of a runner that the scheduler reads."""

    page_size: int
    context_len: int
    max_running_requests: int
    max_saved_states: int | None
    max_prefill_tokens: int
    chunked_prefill_size: int


class DeviceRequest(Protocol):
    """What the device knows of a request."""

    num_output_tokens: int
    recorded_ids: np.ndarray | None
    """The beginning of its output; None: any tokens will do."""
    row: int
    """Its last row; 0 before the first."""
    last_token_s: float
    """When its last token came, if it has lost its row since; NaN before the first."""
    was_admitted: bool


class Watcher(Protocol):
    """Is told what the device sees."""

    def on_admission(self, number: int, num_cached: int) -> None:
        """A request got its row for the first time. `num_cached`: tokens of its prompt that the cache had."""

    def on_token_gaps(self, gaps_s: np.ndarray) -> None:
        """Seconds between a token and the one before it, for each request of a step that has had one."""

    def on_step(self, shape: StepShape, start_s: float, end_s: float) -> None:
        """A step has ended."""


class SimDevice:
    """A `Runner` of the scheduler.

    The seed of a row (`NewRow.seed`) is the number of its request. An asynchronous device works on a step while the
    host plans the next one, like a GPU. A synchronous one is the host itself, like a CPU.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        *,
        max_total_num_tokens: int,
        vocab_size: int,
        profile: DeviceProfile,
        clock: SimClock,
        requests: Mapping[int, DeviceRequest],
        watcher: Watcher,
        scatter: Scatter | None = None,
    ) -> None:
        """`requests`: the live requests by number. `scatter`: of the times of steps; None: equal steps take equally
        long."""
        self.settings = settings
        self.max_total_num_tokens = max_total_num_tokens
        self.is_asynchronous = profile.is_asynchronous
        self.num_steps = 0
        self.busy_s = 0.0
        self.last_step_s = 0.0
        """Seconds for which it worked on the last step that has ended."""
        self._vocab_size = vocab_size
        self._cost = profile.cost
        self._host_s = profile.host_s
        self._clock = clock
        self._requests = requests
        self._watcher = watcher
        self._scatter = scatter
        self._free_at_s = 0.0
        num_rows = settings.max_running_requests + 1
        self._number = np.full(num_rows, -1, dtype=np.int64)
        self._last_len = np.zeros(num_rows, dtype=np.int64)
        """[rows] length of the sequence whose next token is the last one of the output."""
        self._num_prompt = np.zeros(num_rows, dtype=np.int64)
        self._last_token_s = np.full(num_rows, _NEVER)
        self._has_recorded_ids = False

    def load_adapter(self, slot: int, path: str) -> str:
        """Adapters change nothing here."""
        return path

    def unload_adapter(self, slot: int) -> None:
        """As `load_adapter`."""

    def launch(self, step: StepInputs) -> SimStep:
        shape = shape_of(step)
        for new in step.new_rows:
            self._start_row(new.row, new.seed, len(new.prompt_ids))
        if step.extend_lens is not None and step.new_rows:
            self._report_admissions(step)
        start_s, end_s = self._times(step, shape)
        self.num_steps += 1
        self.busy_s += end_s - start_s
        if not self.is_asynchronous:
            self._clock.advance_to(end_s)
        if step.sampled is None:
            rows = step.rows
            return SimStep(self, rows, step.seq_lens, self._number[rows], shape, start_s, end_s)
        choices = step.choices()
        drafted = None if choices.drafts is None else choices
        return SimStep(self, choices.rows, choices.lens, self._number[choices.rows], shape, start_s, end_s, drafted)

    def _times(self, step: StepInputs, shape: StepShape) -> tuple[float, float]:
        """When the device begins and ends a step that is launched now. The host's part passes at once."""
        self._clock.advance_to(self._clock.now_s + self._host_s)
        start_s = max(self._clock.now_s, self._free_at_s)
        seconds = self._cost.seconds(shape)
        if self._scatter is not None:
            seconds *= self._scatter.next(is_extend=shape.is_extend)
        self._free_at_s = start_s + seconds
        return start_s, self._free_at_s

    def finish(self, step: SimStep) -> StepOutput:
        """The tokens of a step, at its end."""
        self._clock.advance_to(step.end_s)
        self.last_step_s = step.end_s - step.start_s
        self._watcher.on_step(step.shape, step.start_s, step.end_s)
        rows, lens = step.rows, step.seq_lens
        last_lens = self._last_len[rows]
        # With overlap, a row may have a new owner, or its request may have ended with the step before.
        counts = (self._number[rows] == step.numbers) & (lens <= last_lens)
        if step.drafted is not None:  # the tokens of a request come at the same time
            counts &= np.isin(np.arange(len(rows)), step.drafted.starts)
        counted = rows[counts]
        gaps = self._clock.now_s - self._last_token_s[counted]
        self._watcher.on_token_gaps(gaps[~np.isnan(gaps)])
        self._last_token_s[counted] = self._clock.now_s
        tokens = (step.numbers * 7919 + lens) % self._vocab_size
        tokens[lens == last_lens] = eos_id(self._vocab_size)
        if self._has_recorded_ids:  # their last token may be a stop token, which later prompts have
            self._play(step, tokens)
        if step.drafted is None:
            return StepOutput(tokens.astype(np.int32))
        verified = verify(tokens.astype(np.int32), step.drafted)
        return StepOutput(verified.tokens, verified.num_tokens)

    def _start_row(self, row: int, number: int, num_prompt_tokens: int) -> None:
        before = self._requests.get(int(self._number[row]))
        if before is not None:
            before.last_token_s = float(self._last_token_s[row])
        request = self._requests[number]
        if self._number[request.row] == number:  # it was retracted, and nobody has had its row since
            request.last_token_s = float(self._last_token_s[request.row])
        request.row = row
        self._number[row] = number
        self._has_recorded_ids |= request.recorded_ids is not None
        self._num_prompt[row] = num_prompt_tokens
        self._last_len[row] = num_prompt_tokens + request.num_output_tokens - 1
        self._last_token_s[row] = request.last_token_s

    def _play(self, step: SimStep, tokens: np.ndarray) -> None:
        """Writes the recorded tokens, so that later prompts find the recorded answers in the cache."""
        places = step.seq_lens - self._num_prompt[step.rows]
        for line, (number, place) in enumerate(zip(step.numbers.tolist(), places.tolist(), strict=True)):
            request = self._requests.get(number)
            ids = None if request is None else request.recorded_ids
            if ids is not None and 0 <= place < len(ids):
                tokens[line] = ids[place]

    def _report_admissions(self, step: StepInputs) -> None:
        assert step.extend_lens is not None
        starts = dict(zip(step.rows.tolist(), (step.seq_lens - step.extend_lens).tolist(), strict=True))
        for new in step.new_rows:
            request = self._requests[new.seed]
            if not request.was_admitted:
                request.was_admitted = True
                self._watcher.on_admission(new.seed, min(starts[new.row], len(new.prompt_ids)))


def shape_of(step: StepInputs) -> StepShape:
    """The shape of a step."""
    num_decodes = 0 if step.input_ids is None else int(np.count_nonzero(step.input_ids == FROM_DEVICE))
    return StepShape.of(step, num_decodes)


@dataclass(slots=True)
class SimStep:
    """A launched step."""

    device: SimDevice
    rows: Int32Array
    """[N], the row of each choice."""
    seq_lens: Int32Array
    """[N], the length of the request before each."""
    numbers: np.ndarray
    """[N], the owners of the rows at the launch."""
    shape: StepShape
    start_s: float
    end_s: float
    drafted: Choices | None = None
    """The choices of a step with drafts."""

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Tokens are chosen in `wait`. Requests of a simulation have no grammars."""
        assert masks is None

    def wait(self) -> StepOutput:
        return self.device.finish(self)
