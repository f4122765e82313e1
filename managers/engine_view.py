"""The data of the live view of the engine: its last steps, its requests, and the hottest prefixes of its cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain, islice

from ..mem_cache.base_prefix_cache import BasePrefixCache
from ..srt.io_struct import EngineView, SchedulerState
from ..srt.view_parts import RequestView, StepRecord
from .req import Req
from .request_queues import RequestQueues
from .schedule_batch import ScheduleBatch

MAX_STEPS = 256
"""The number of steps that the log keeps."""
MAX_REQUESTS = 64
MAX_PREFIXES = 12
MAX_PREFIX_TOKENS = 48


class StepLog:
    """The last steps of the scheduler, with their times. A step costs two reads of the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds from any start."""
        self._clock = clock
        self._launched: deque[float] = deque()
        """Launch times of the steps in flight, oldest first."""
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0
        self.start_s = self.end_s = 0.0
        """Of the last step."""

    def on_launch(self) -> None:
        self._launched.append(self._clock())

    def on_result(self, batch: ScheduleBatch) -> float:
        """Records the oldest step in flight. With overlap, it began when the step before it ended.

        Returns its seconds, for the planner.
        """
        self.start_s = max(self._launched.popleft(), self.end_s)
        self.end_s = self._clock()
        seconds = self.end_s - self.start_s
        self._num_steps += 1
        num_decodes = batch.inputs.num_tokens - batch.num_prompt_tokens
        self._steps.append(StepRecord(self._num_steps, self.start_s, seconds, batch.num_prompt_tokens, num_decodes))
        return seconds

    @property
    def now_s(self) -> float:
        return self._clock()

    def after(self, number: int) -> list[StepRecord]:
        """The remembered steps with a higher number, oldest first. All of them if there is no step of this number yet:
        the client knows it from an engine before a restart."""
        if number > self._num_steps:
            number = 0
        return [step for step in self._steps if step.number > number]


def view_engine(
    state: SchedulerState,
    generated_tokens: int,
    step_log: StepLog,
    after_step: int,
    queues: RequestQueues,
    cache: BasePrefixCache,
) -> EngineView:
    """The engine between two steps. `generated_tokens`: since its start."""
    unfinished = chain(queues.holders(), queues.waiting)
    return EngineView(
        now_s=step_log.now_s,
        state=state,
        generated_tokens=generated_tokens,
        steps=step_log.after(after_step),
        requests=[_view_request(req) for req in islice(unfinished, MAX_REQUESTS)],
        prefixes=cache.hottest(MAX_PREFIXES, MAX_PREFIX_TOKENS),
    )


def _view_request(req: Req) -> RequestView:
    return RequestView(
        rid=req.rid,
        stage=req.stage.value,
        prompt_tokens=len(req.prompt_ids),
        cached_tokens=req.cached_tokens or 0,
        computed_tokens=req.kv_len,
        output_tokens=len(req.output_ids),
        max_new_tokens=req.max_new_tokens,
    )
