"""The fit of a step's cost to a whole recording."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.benchmarks.simulator.whole_fit import fit_cost
from tercet.managers.step_cost import StepCost, StepShape

TRUE = StepCost(5e-3, 1e-3, 2e-4, 6e-4, 3e-7, 1e-6, 3e-4)


def steps(rng, count):
    """Random steps: half of them decode, and half of the others have rows that decode beside prompts."""
    for number in range(count):
        rows, context = int(rng.integers(1, 17)), int(rng.integers(10, 20_000))
        if number % 2:
            yield StepShape.of_decode(rows, context)
        else:
            joined = int(rng.integers(0, 8)) if number % 4 else 0
            tokens = int(rng.integers(1, 2_000))
            yield StepShape(True, rows + joined, tokens, tokens * context, joined * 300, joined)


def test_exact_times_give_the_coefficients_back():
    shapes = [*steps(np.random.default_rng(1), 400)]
    found = fit_cost(shapes, [TRUE.seconds(shape) for shape in shapes])
    assert found == pytest.approx(TRUE, rel=2e-2)
    assert [found.seconds(shape) for shape in shapes] == pytest.approx([TRUE.seconds(shape) for shape in shapes], 1e-3)


@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 60))
def test_the_sum_is_the_measured_one(seed, count):
    rng = np.random.default_rng(seed)
    shapes = [*steps(rng, count)]
    seconds = [TRUE.seconds(shape) * rng.uniform(0.5, 2) for shape in shapes]
    found = fit_cost(shapes, seconds)
    assert min(found) >= 0
    assert sum(map(found.seconds, shapes)) == pytest.approx(sum(seconds), rel=0.02)


def test_few_steps_of_similar_shapes_are_fitted_to_the_end():
    """The extend steps of W2: positions grow with tokens, so the two are hard to tell apart."""
    shapes = [
        StepShape(True, 1, 1024, 524_800, 0),
        StepShape(True, 15, 1920, 1_844_160, 0),
        StepShape(True, 7, 896, 860_608, 0),
        StepShape(True, 9, 1152, 1_106_496, 0),
        *(StepShape.of_decode(16, 16 * length) for length in range(1024, 1088)),
    ]
    seconds = [TRUE.seconds(shape) for shape in shapes]
    found = fit_cost(shapes, seconds)
    assert [found.seconds(shape) for shape in shapes] == pytest.approx(seconds, rel=0.01)


def test_a_recording_without_times_has_no_cost():
    with pytest.raises(ValueError, match="no step"):
        fit_cost([StepShape.of_decode(1, 5)], [0.0])
