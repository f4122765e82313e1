"""The scatter of the times of steps."""

from __future__ import annotations

import itertools

import pytest
from simulations import flat_cost, request, settings

from tercet.benchmarks.presets import load_shape
from tercet.benchmarks.simulator.scatter import Scatter
from tercet.benchmarks.simulator.simulation import Simulation
from tercet.benchmarks.simulator.statistics import RunStatistics
from tercet.benchmarks.simulator.traffic import Traffic


def test_extend_and_decode_steps_have_ratios_of_their_own_which_repeat() -> None:
    scatter = Scatter([1.5, 0.5], [2.0])
    assert [scatter.next(is_extend=True) for _ in range(3)] == [1.5, 0.5, 1.5]
    assert scatter.next(is_extend=False) == 2.0
    assert Scatter([], []).next(is_extend=True) == 1.0


def test_a_simulated_step_takes_its_cost_times_the_ratio() -> None:
    simulation = Simulation(
        settings(),
        load_shape("smollm2-135m"),
        flat_cost(1.0),
        Traffic(iter([request(0.0, 10, 3)])),
        RunStatistics(),
        scatter=Scatter([3.0], itertools.chain([0.25], itertools.repeat(2.0))),
    )
    simulation.run()
    assert simulation.statistics.ttft.max_s == pytest.approx(3.0)
    assert simulation.statistics.e2el.max_s == pytest.approx(3.0 + 0.25 + 2.0)
