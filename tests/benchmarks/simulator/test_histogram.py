"""Quantiles of durations, against sorted lists, and fairness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.benchmarks.simulator.histogram import LogHistogram
from tercet.benchmarks.simulator.statistics import RunStatistics, Served, jain_index
from tercet.srt.io_struct import AbortFinish, LengthFinish


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=50), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_close_to_the_sorted_value(values: list[float], share: float) -> None:
    one, all_at_once = LogHistogram(), LogHistogram()
    for value in values:
        one.add(value)
    all_at_once.add_all(np.array(values))
    exact = sorted(values)[max(math.ceil(share * len(values) - 1e-9), 1) - 1]
    assert one.quantile(share) == pytest.approx(exact, rel=0.006)
    assert all_at_once.quantile(share) == one.quantile(share)
    assert one.count == all_at_once.count == len(values) and one.max_s == max(values)
    xs, ys = one.cdf()
    assert ys[-1] == pytest.approx(1.0) and (np.diff(xs) > 0).all()


def test_extreme_durations_are_counted() -> None:
    histogram = LogHistogram()
    assert histogram.quantile(0.5) is None
    histogram.add_all(np.array([]))
    histogram.add_all(np.array([0.0, 1e12]))
    assert histogram.count == 2 and histogram.quantile(0.1) == pytest.approx(1e-6, rel=0.01)


def test_a_tenant_that_completes_nothing_is_treated_unfairly() -> None:
    statistics = RunStatistics()
    statistics.add(Served("refused", 5, 0, 0.0, None, 0.0, AbortFinish("the queue is full", 503, "queue_full")))
    assert statistics.fairness is None
    statistics.add(Served("waited", 5, 0, 0.0, None, 9.0, AbortFinish("the client has gone")))
    assert statistics.fairness is None
    statistics.add(Served("served", 5, 8, 0.0, 0.5, 2.0, LengthFinish(8)))
    assert statistics.fairness == pytest.approx(1 / 3)


def test_jain_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
