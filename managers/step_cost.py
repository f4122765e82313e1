"""The time of a step: a linear cost, and a model that fits it to measured steps while the engine serves.

The time of a step is a constant, plus a cost for each row, each prompt token, and each position that attention reads.
All coefficients are at least 0, so more work never takes less time.
"""

from __future__ import annotations

from math import inf, sqrt
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..model_executor.step import ForwardMode, StepInputs


class StepShape(NamedTuple):
    """The work of one step, as far as its cost depends on it. Shapes of parts of a step add up (`plus`)."""

    is_extend: bool
    num_rows: int = 0
    num_prompt_tokens: int = 0
    """Drafts and forced tokens count as prompt tokens, because a step computes all of them in the same way."""
    prompt_context: int = 0
    """The positions that all prompt tokens attend to, each token to itself and to those before it."""
    decode_context: int = 0
    """The positions that the newest tokens of the decoding rows attend to."""
    num_joined: int = 0
    """The rows that decode in an extend step. They are in `num_rows`, too."""

    @classmethod
    def of(cls, inputs: StepInputs, num_decodes: int) -> StepShape:
        """`num_decodes`: rows that decode. In an extend step they are the last ones."""
        num_rows = len(inputs.rows)
        if inputs.mode is ForwardMode.DECODE:
            return cls.of_decode(num_rows, sum(inputs.seq_lens.tolist()))
        assert inputs.extend_lens is not None
        ends = inputs.seq_lens.astype(np.int64)
        starts = ends - inputs.extend_lens
        context = int(np.dot(ends, ends + 1) - np.dot(starts, starts + 1)) // 2
        decode_context = int(starts[num_rows - num_decodes :].sum()) + num_decodes
        return cls(
            is_extend=True,
            num_rows=num_rows,
            num_prompt_tokens=inputs.num_tokens - num_decodes,
            prompt_context=context - decode_context,
            decode_context=decode_context,
            num_joined=num_decodes,
        )

    @classmethod
    def of_decode(cls, num_rows: int, context: int) -> StepShape:
        """A decode step, in which the rows attend to `context` positions in all."""
        return cls(is_extend=False, num_rows=num_rows, decode_context=context)

    @classmethod
    def of_prompt(cls, start: int, end: int) -> StepShape:
        """One prompt's part of an extend step: its positions [start, end)."""
        context = (end * (end + 1) - start * (start + 1)) // 2
        return cls(is_extend=True, num_rows=1, num_prompt_tokens=end - start, prompt_context=context)

    def plus(self, other: StepShape) -> StepShape:
        return StepShape(
            self.is_extend or other.is_extend,
            self.num_rows + other.num_rows,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.prompt_context + other.prompt_context,
            self.decode_context + other.decode_context,
            self.num_joined + other.num_joined,
        )


class StepCost(NamedTuple):
    """The coefficients of a linear cost, in seconds."""

    step_s: float = 0.0
    extend_s: float = 0.0
    """Of an extend step, beside `step_s`. Extend steps are launched, unless a CPU has recorded them; decode steps are
    recorded."""
    row_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_context_s: float = 0.0
    """Of one position that one prompt token attends to."""
    decode_context_s: float = 0.0
    """Of one position that a decoding row attends to."""
    joined_row_s: float = 0.0
    """Of a row that decodes in an extend step, beside `row_s`."""

    def seconds(self, shape: StepShape) -> float:
        return (
            self.step_s
            + (self.extend_s if shape.is_extend else 0.0)
            + self.row_s * shape.num_rows
            + self.prompt_token_s * shape.num_prompt_tokens
            + self.prompt_context_s * shape.prompt_context
            + self.decode_context_s * shape.decode_context
            + self.joined_row_s * shape.num_joined
        )

    def prompt_tokens_within(self, budget_s: float, beside: StepShape, start: int) -> float:
        """The most tokens of one prompt, from position `start` on, for a step of at most `budget_s` seconds.

        `beside`: the rest of the step. At least 0, and infinite if such tokens cost nothing.
        """
        empty = StepShape(is_extend=True, num_rows=1)
        left_s = budget_s - self.seconds(beside.plus(empty))
        if left_s <= 0:
            return 0
        # n tokens cost a * n**2 + b * n.
        a = self.prompt_context_s / 2
        b = self.prompt_token_s + self.prompt_context_s * (start + 0.5)
        if b <= 0:
            return inf
        return int(2 * left_s / (b + sqrt(b * b + 4 * a * left_s)))


PRIOR = StepCost(step_s=0.01, prompt_token_s=1e-3)
"""Before any step was measured: a slow machine, so that the first steps are rather too short than too long."""
_SCALES = StepCost(
    step_s=1.0,
    extend_s=1.0,
    row_s=8.0,
    prompt_token_s=512.0,
    prompt_context_s=2.0**20,
    decode_context_s=2.0**14,
    joined_row_s=8.0,
)
"""Typical features of a step. The fit computes with multiples of them, so that its unknowns have similar sizes."""
_SCALES_ARRAY = np.array(_SCALES)
_ORDER = sorted(range(len(_SCALES)), key=lambda i: StepCost._fields[i] != "prompt_token_s")
"""In which the unknowns are solved for. The first one explains most of what the first steps show, and machines differ
most in the cost of a prompt token."""


class _FarSteps(NamedTuple):
    """Steps of one kind in a row that took far longer than predicted, or far shorter."""

    is_longer: bool
    cost: StepCost
    """What this and the next two were before the first of these steps."""
    squares: npt.NDArray[np.float64]
    targets: npt.NDArray[np.float64]
    ratios: list[float]
    """Of each step, its time to that by `cost`."""


class StepCostModel:
    """Fits a StepCost to measured steps, by least squares of the relative errors.

    The weight of old steps decays exponentially, but a step lowers only the weights of its own kind: however long the
    engine only decodes, the cost of prompts stays known. The solver is coordinate descent from the last solution, with
    coefficients >= 0. What the steps say nothing about keeps its value.
    """

    KEPT = 0.96
    """The share of its weight that a step keeps at each new step of its kind."""
    NUM_SKIPPED = 1
    """First steps of each kind that are not observed: they may compile kernels or touch memory for the first time."""
    NUM_UNSURE = 8
    """The following steps of each kind are believed, however far from the prediction they are."""
    MAX_RATIO = 3.0
    """A later step counts as at most so many times longer or shorter than predicted. So an outlier does little."""
    FAR_RATIO, NUM_FAR = 2.0, 4
    """So many steps of a kind in a row that are all this many times longer than predicted, or all shorter, are no
    outliers. The machine has changed its speed, and earlier steps of the kind count as if it had had the new one."""
    _MIN_PREDICTED = 1e-4
    """A prediction that is a smaller share of the time of its step is none: no step before was like this one. No
    machine changes its speed by so much."""
    _KEPT_OF_OTHERS = 1e-3
    _SWEEPS = 4
    _DECODES_PER_SOLUTION = 8
    """Decode steps tell little that is new, so not each of them is worth a solution."""

    def __init__(self) -> None:
        self._cost = PRIOR
        self._theta = [value * scale for value, scale in zip(PRIOR, _SCALES, strict=True)]
        size = len(self._theta)
        # Of decode steps and of extend steps: the normal equations, sums of z * z and of z, where z is the scaled
        # features divided by the seconds that the step took or should have taken.
        self._squares = np.zeros((2, size, size))
        self._targets = np.zeros((2, size))
        self._num_seen = [0, 0]
        self._far: list[_FarSteps | None] = [None, None]
        """Of each kind, its last steps, if all of them were far from the predictions on the same side."""
        self._error = [0.0, 0.0]
        self._pending: list[tuple[StepShape, float, bool]] = []
        """The decode steps since the last solution, as arguments of `_add`. Between two steps, when the caches have no
        code of numpy, it takes 150 us to add one; together with others, it takes 15."""

    @property
    def cost(self) -> StepCost:
        return self._cost

    def spread(self, *, is_extend: bool) -> float:
        """The root mean square of the relative errors of recent predictions. 0 before any step was compared. Decode
        steps count from the next solution on."""
        return sqrt(self._error[is_extend])

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took so long."""
        kind = int(shape.is_extend)
        self._num_seen[kind] += 1
        num_used = self._num_seen[kind] - self.NUM_SKIPPED
        if num_used <= 0 or seconds <= 0:
            return
        is_believed = num_used <= self.NUM_UNSURE
        self._pending.append((shape, seconds, is_believed))
        if shape.is_extend or is_believed or num_used % self._DECODES_PER_SOLUTION == 0:
            for step in self._pending:
                self._add(*step)
            self._pending.clear()
            self._solve()

    def _add(self, shape: StepShape, seconds: float, is_believed: bool) -> None:
        """Add a step to the normal equations. `is_believed`: it counts however far from the prediction it is."""
        kind = int(shape.is_extend)
        unit = 0.0 if is_believed else self._predicted(self._cost, shape, seconds)
        if unit and self._has_changed(kind, shape, seconds):
            unit = self._predicted(self._cost, shape, seconds)
        if not unit:
            unit = seconds  # a long first step is an exception rather than the rule, so it has little weight
        else:
            seconds = min(max(seconds, unit / self.MAX_RATIO), unit * self.MAX_RATIO)
            self._error[kind] += (1 - self.KEPT) * ((seconds / unit - 1) ** 2 - self._error[kind])
        z = np.array((1, *shape)) / _SCALES_ARRAY / unit
        self._squares[kind] *= self.KEPT
        self._squares[kind] += z[:, None] * z
        self._targets[kind] *= self.KEPT
        self._targets[kind] += z * (seconds / unit)

    def _predicted(self, cost: StepCost, shape: StepShape, seconds: float) -> float:
        """The time of a step that took `seconds`, by `cost`. 0: there is no prediction."""
        predicted = cost.seconds(shape)
        return predicted if predicted > self._MIN_PREDICTED * seconds else 0.0

    def _has_changed(self, kind: int, shape: StepShape, seconds: float) -> bool:
        """Notes how far a step is from its prediction. If the machine has changed, adapts to it."""
        ratio = seconds / self._cost.seconds(shape)
        if 1 / self.FAR_RATIO < ratio < self.FAR_RATIO:
            self._far[kind] = None
            return False
        far = self._far[kind]
        if far is None or far.is_longer != (ratio > 1):
            far = _FarSteps(ratio > 1, self._cost, self._squares[kind].copy(), self._targets[kind].copy(), [])
            self._far[kind] = far
        before_s = self._predicted(far.cost, shape, seconds)
        if not before_s:
            self._far[kind] = None
            return False
        far.ratios.append(seconds / before_s)
        if len(far.ratios) < self.NUM_FAR:
            return False
        change = sorted(far.ratios)[self.NUM_FAR // 2]
        self._squares[kind] = far.squares / (change * change)
        self._targets[kind] = far.targets / change
        # Steps of the other kind may have changed, too. If not, the next ones soon say so.
        self._squares[1 - kind] *= self._KEPT_OF_OTHERS
        self._targets[1 - kind] *= self._KEPT_OF_OTHERS
        self._theta = [value * scale * change for value, scale in zip(far.cost, _SCALES, strict=True)]
        self._solve()
        self._far[kind] = None
        return True

    def _solve(self) -> None:
        theta = self._theta
        squares, targets = self._squares.sum(0).tolist(), self._targets.sum(0).tolist()
        rows = [(i, squares[i], targets[i]) for i in _ORDER]
        for _ in range(self._SWEEPS):
            for i, row, target in rows:
                if row[i] > 0:
                    slope = target - sum(map(mul, row, theta))
                    theta[i] = max(theta[i] + slope / row[i], 0.0)
        self._cost = StepCost(*[value / scale for value, scale in zip(theta, _SCALES, strict=True)])
