"""The bound on the time between two tokens of a running request, and the prompt tokens that an extend step may have."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal

from ..model_executor.step import StepInputs
from .req import Req
from .step_cost import StepCost, StepCostModel, StepShape

MIN_TOKENS = 32
"""Prompt tokens that a step may always have. So prompts progress even if no step can keep the bound."""
DECODES_PER_EXTEND = 3
"""Decode steps that follow an extend step for which running requests had to wait. A step has a cost however few tokens
it computes, so an endless run of small prompts must not get most of the steps."""
TRIAL_PERIOD = 16
"""Of so many extend steps beside running requests, one is a trial of the slower way to decode."""
_SHORTEST = StepShape.of_prompt(0, MIN_TOKENS)
AUTO_GAP_S, AUTO_GAP_STEPS = 0.25, 15
"""The automatic bound: these seconds, or the time of so many decode steps if that is longer. A reader hardly notices
such a pause. The second part keeps the throughput of a slow machine, where shorter steps would be mostly overhead."""
MIN_MARGIN, MAX_MARGIN = 1.03, 2.0
"""Steps are planned to be shorter than a given bound by this factor, which grows with twice the usual error of
predictions. The automatic bound has none: on a noisy machine, shorter steps would cost throughput."""


class TimeBudget:
    """The seconds of one extend step. It shrinks with every prompt that joins the step."""

    def __init__(self, cost: StepCost, budget_s: float, beside: StepShape, *, joins: bool) -> None:
        """`beside`: the decodes that join the step. `joins`: whether they do."""
        self.joins = joins
        self._cost = cost
        self._left_s = budget_s
        self._step = beside
        self._reqs: set[Req] = set()
        """Those with prompts in the step."""

    def room(self, req: Req, start: int) -> float:
        """Tokens of a prompt, from position `start` on, that the step still has time for. May be infinite."""
        return self._cost.prompt_tokens_within(*self._beside(req), start)

    def take(self, req: Req, start: int, end: int) -> None:
        """Positions [start, end) of a prompt join the step."""
        self._left_s, beside = self._beside(req)
        self._step = beside.plus(StepShape.of_prompt(start, end))
        self._reqs.add(req)

    def _beside(self, req: Req) -> tuple[float, StepShape]:
        """The seconds for the step if it has more of this request, and the step without the request's row."""
        if req in self._reqs:  # its row was counted before
            return self._left_s, self._step._replace(num_rows=self._step.num_rows - 1)
        later_s = self._cost.row_s + self._cost.decode_context_s * req.num_tokens  # in the decode step after this step
        return self._left_s - later_s, self._step


class TokenGapBound:
    """Bounds the time between two tokens of the running requests, while prompts are computed beside them.

    A running request waits for one extend step and one decode step, or for one step that has both. Their times are
    predicted by a model that is fitted to the measured steps.
    """

    def __init__(self, max_gap_s: float | Literal["auto"]) -> None:
        self.model = StepCostModel()
        self._max_gap_s = max_gap_s
        self._num_choices = 0

    def observe(self, inputs: StepInputs, num_decodes: int, seconds: float) -> None:
        """A step took so long, from its launch or the end of the step before, to its result."""
        self.model.observe(StepShape.of(inputs, num_decodes), seconds)

    def budget(self, decodes: Sequence[Req], *, always_join: bool) -> TimeBudget:
        """For an extend step that these requests wait for. `always_join`: they join it, even if it is slower."""
        cost = self.model.cost
        alone = StepShape.of_decode(len(decodes), sum([req.kv_len for req in decodes]) + len(decodes))
        decode_s = cost.seconds(alone)
        gap_s = self._planned_gap_s(decode_s)
        before_s = gap_s - decode_s
        if always_join or self._joins(len(decodes), before_s):
            return TimeBudget(cost, gap_s, alone._replace(is_extend=True, num_joined=len(decodes)), joins=True)
        return TimeBudget(cost, before_s, StepShape(is_extend=True), joins=False)

    def _planned_gap_s(self, decode_s: float) -> float:
        """`decode_s`: of a decode step of the running requests."""
        if self._max_gap_s == "auto":
            return max(AUTO_GAP_S, AUTO_GAP_STEPS * decode_s)
        return self._max_gap_s / min(MIN_MARGIN + 2 * self.model.spread(is_extend=True), MAX_MARGIN)

    def _joins(self, num_decodes: int, before_s: float) -> bool:
        """Whether so many rows should decode in the extend step. `before_s`: what a decode step after it leaves of the
        bound.

        They should if that takes less time. One time in TRIAL_PERIOD it is the other way round, if the bound allows it:
        the model learns the difference only if it sees both.
        """
        cost = self.model.cost
        is_faster = cost.joined_row_s * num_decodes < cost.step_s
        if cost.seconds(_SHORTEST) > before_s:
            return is_faster
        self._num_choices += 1
        return is_faster != (self._num_choices % TRIAL_PERIOD == 0)

    def decodes_due(self, num_prompt_tokens: int, max_prefill_tokens: int) -> int:
        """Decode steps that follow an extend step: as many for each prompt token as without a bound, and at least 1."""
        return max(ceil(DECODES_PER_EXTEND * min(num_prompt_tokens / max_prefill_tokens, 1)), 1)
