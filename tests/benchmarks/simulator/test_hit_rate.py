"""The hit rate of the server's policies beside that of an offline optimum, in simulated time."""

from __future__ import annotations

import pytest
from simulations import simulate, traffic_settings

from tercet.benchmarks.offline_workloads import Span
from tercet.benchmarks.simulator.cost import PROFILES
from tercet.benchmarks.simulator.synthetic import prefix_tree


def share_of_optimum(policy: str, seed: int) -> float:
    """The hit rate on a tree of 3,840 tokens, as a share of the best possible one. The pool has room for two trees, but
    the prompts' own tokens and the answers would need it more than twice."""
    traffic = traffic_settings(
        num_requests=300, request_rate=float("inf"), input_len=Span(16, 64), output_len=Span(8, 32), seed=seed
    )
    simulation = simulate(
        prefix_tree(traffic, levels=2, branching=5, level_len=128, skew=1.0),
        cost=PROFILES["smollm2-135m-2-cores"],
        num_traced=300,
        schedule_policy=policy,
        max_total_tokens=8192,
        max_prefill_tokens=1024,
        chunked_prefill_size=512,
        context_length=1024,
    )
    rates = simulation.hit_rates()
    assert rates is not None and rates.best > 0.8
    return rates.found / rates.best


@pytest.mark.parametrize("seed", [1, 2])
def test_lpm_finds_what_an_offline_optimum_finds(seed: int) -> None:
    share = share_of_optimum("lpm", seed)
    assert share >= 0.98
    assert share > share_of_optimum("fcfs", seed)
