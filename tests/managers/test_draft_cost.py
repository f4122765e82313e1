"""The time that drafts add to a step is learned, and drafts are those that raise the tokens per second most."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.managers.draft_cost import MIN_GAIN, DraftCost, added_time, choose_counts, step_time


def rate(guesses: list[tuple[float, int]], counts: tuple[int, ...], factor: float) -> float:
    """Expected tokens of a step for the time of a step of one token."""
    tokens = sum(
        1 + sum(share**place for place in range(1, n + 1)) for (share, _), n in zip(guesses, counts, strict=True)
    )
    num_reqs = len(guesses)
    added = added_time(num_reqs, num_reqs + sum(counts)) if any(counts) else 0.0
    return tokens / (step_time(num_reqs) + factor * added)


@given(
    st.lists(st.tuples(st.floats(0, 0.98), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(0, 8),
    st.floats(0.1, 4),
)
@settings(deadline=None)
def test_the_drafts_are_those_of_the_highest_rate(
    guesses: list[tuple[float, int]], num_left: int, factor: float
) -> None:
    counts = tuple(choose_counts(guesses, num_left, factor))
    assert all(0 <= count <= limit for count, (_, limit) in zip(counts, guesses, strict=True))
    assert sum(counts) <= num_left
    every = product(*(range(limit + 1) for _, limit in guesses))
    best = max(rate(guesses, choice, factor) for choice in every if sum(choice) <= num_left)
    least = MIN_GAIN * rate(guesses, (0,) * len(guesses), factor)
    if any(counts):
        assert rate(guesses, counts, factor) == pytest.approx(best) and best > least
    else:
        assert best <= least * (1 + 1e-9)


def test_more_tokens_never_take_less_time() -> None:
    times = [step_time(n) for n in range(1, 40)]
    assert times[0] == 1 and times == sorted(times)
    assert all(added_time(reqs, reqs + 1) > 0 for reqs in range(1, 20))


def learned(factor: float, *, noise: float = 0.0, stalls: bool = False, num_steps: int = 400) -> float:
    """What is learned of a machine on which drafts take so many times the time of the constants."""
    cost, rng = DraftCost(), np.random.default_rng(1)
    for number in range(num_steps):
        num_reqs = int(rng.integers(1, 9))
        num_drafts = int(rng.integers(1, 8)) if number % 3 else 0
        time = step_time(num_reqs) + (factor * added_time(num_reqs, num_reqs + num_drafts) if num_drafts else 0.0)
        seconds = 0.004 * time * float(rng.lognormal(0, noise))
        cost.observe(num_reqs, num_reqs + num_drafts, seconds + (0.5 if stalls and number % 50 == 7 else 0.0))
    return cost.factor


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
def test_the_time_of_drafts_is_learned(factor: float) -> None:
    assert learned(factor) == pytest.approx(factor, rel=0.1)
    assert learned(factor, noise=0.03, num_steps=2000) == pytest.approx(factor, rel=0.25)


def test_steps_that_stall_count_little() -> None:
    assert learned(1.0, stalls=True) < 1.6


def test_drafts_that_cost_nothing_keep_a_small_factor() -> None:
    assert learned(0.0) == pytest.approx(0.1)


def test_what_was_learned_is_forgotten_without_drafts() -> None:
    cost = DraftCost()
    cost.observe(1, 1, 0.01)
    for _ in range(200):
        cost.observe(1, 5, 1.0)
    assert cost.factor > 3.5
    for _ in range(4000):
        cost.observe(1, 1, 0.01)
    assert cost.factor < 1.2


def test_nothing_is_learned_before_the_first_step_without_drafts() -> None:
    cost = DraftCost()
    cost.observe(1, 5, 1.0)
    assert cost.factor == 1.0
