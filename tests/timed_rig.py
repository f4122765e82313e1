"""A scheduler on the fake runner in simulated time: each step takes as long as a linear cost says."""

from __future__ import annotations

import numpy as np
from scheduler_rig import Rig

from fakes import FakeClock, FakeRunner, FakeStep
from tercet.managers.step_cost import StepCost, StepShape
from tercet.model_executor.step import FROM_DEVICE, LaunchedStep, StepInputs, StepOutput, TokenMasks

SLOW = StepCost(0.012, 0.003, 0.002, 9e-4, 4e-8, 2e-7)
"""Like a small model on two cores."""
FAST = StepCost(0.008, 0.002, 1e-5, 3e-5, 5e-10, 2e-9)
"""Like an 8B model on a GPU."""


class TimedStep:
    """A launched step that ends at `end_s`."""

    def __init__(self, step: FakeStep, end_s: float, clock: FakeClock) -> None:
        self._step = step
        self._end_s = end_s
        self._clock = clock

    def sample(self, masks: TokenMasks | None = None) -> None:
        self._step.sample(masks)

    def wait(self) -> StepOutput:
        self._clock.now = max(self._clock.now, self._end_s)
        return self._step.wait()


class TimedRunner:
    """A device that runs the steps of a FakeRunner one after the other."""

    def __init__(self, runner: FakeRunner, cost: StepCost, clock: FakeClock) -> None:
        self.steps = runner.steps
        self._runner = runner
        self._cost = cost
        self._clock = clock
        self._free_at_s = 0.0

    def launch(self, step: StepInputs) -> LaunchedStep:
        num_decodes = len(step.rows) if step.input_ids is None else int((step.input_ids == FROM_DEVICE).sum())
        self._free_at_s = max(self._free_at_s, self._clock.now) + self._cost.seconds(StepShape.of(step, num_decodes))
        return TimedStep(self._runner.launch(step), self._free_at_s, self._clock)


class TimedRig(Rig):
    """Nothing but steps takes time. `times_s`: when the client of each request got its tokens."""

    def __init__(self, cost: StepCost, **settings) -> None:
        super().__init__(**{"audit": False, **settings})
        self.device = self.scheduler._profiling.runner = TimedRunner(self.runner, cost, self.clock)
        self.times_s: dict[str, list[float]] = {}
        self.added_s: dict[str, float] = {}

    def add(self, rid: str, prompt: list[int], **options) -> None:
        self.added_s[rid] = self.clock.now
        super().add(rid, prompt, **options)

    def turn(self) -> None:
        super().turn()
        for rid, heard in self.heard.items():
            times = self.times_s.setdefault(rid, [])
            times += [self.clock.now] * (len(heard.ids) - len(times))

    def ttft_s(self, rid: str) -> float:
        return self.times_s[rid][0] - self.added_s[rid]

    def end_s(self, rid: str) -> float:
        """From its arrival to its last token."""
        return self.times_s[rid][-1] - self.added_s[rid]

    def gaps_s(self, rid: str) -> list[float]:
        return np.diff(self.times_s[rid]).tolist()
