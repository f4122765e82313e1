"""Arrival processes: the mean rate, the spread of gaps, traces."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.benchmarks.arrivals import arrival_times, trace_times


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("rate", [0.5, 10.0, 3000.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_is_the_mean_and_burstiness_the_spread(rate: float, burstiness: float) -> None:
    gaps = np.diff(arrival_times(40_001, rate, burstiness, rng()))
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.var() == pytest.approx(1 / rate**2 / burstiness, rel=0.15)


def test_a_poisson_process_counts_like_one() -> None:
    times = arrival_times(20_000, 5.0, 1.0, rng())
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(5, rel=0.05)
    assert counts.var() == pytest.approx(5, rel=0.15)


@given(st.integers(0, 50), st.floats(0.1, 1e4), st.floats(0.05, 20), st.integers(0, 5))
def test_times_begin_at_zero_and_never_go_back(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrival_times(count, rate, burstiness, rng(seed))
    assert times.shape == (count,)
    assert (times[:1] == 0).all() and (np.diff(times) >= 0).all() and np.isfinite(times).all()
    assert (times == arrival_times(count, rate, burstiness, rng(seed))).all()


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(7, math.inf, 1.0, rng()).tolist() == [0.0] * 7


@pytest.mark.parametrize("rate, burstiness", [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.inf), (1, math.nan)])
def test_nonsense_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        arrival_times(3, rate, burstiness, rng())


def test_a_trace_starts_at_its_first_request_and_can_be_slowed_down() -> None:
    assert trace_times([7.0, 7.5, 9.0], 1.0).tolist() == [0.0, 0.5, 2.0]
    assert trace_times([7.0, 7.5, 9.0], 2.0).tolist() == [0.0, 1.0, 4.0]
    assert trace_times([], 1.0).size == 0
    for timestamps, slowdown, message in (
        ([1.0, None], 1.0, "no timestamps"),
        ([2.0, 1.0], 1.0, "must not decrease"),
        ([1.0], 0.0, "slowdown"),
    ):
        with pytest.raises(ValueError, match=message):
            trace_times(timestamps, slowdown)
