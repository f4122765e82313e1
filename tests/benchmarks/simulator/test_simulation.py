"""Runs of the simulator: known times, equal figures for equal seeds, and memory that does not grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import flat_cost, request, simulate, traffic_settings

from tercet.benchmarks.offline_workloads import Span
from tercet.benchmarks.simulator.report import Run
from tercet.benchmarks.simulator.synthetic import agents, prefix_tree, random_prompts
from tercet.benchmarks.simulator.traffic import Traffic


def test_the_times_of_one_request_are_those_of_its_steps() -> None:
    stats = simulate([request(5.0, 100, 4)], cost=flat_cost(1.0, 0.01)).statistics
    assert stats.ttft.max_s == pytest.approx(2.0), "one step and 100 tokens"
    assert stats.e2el.max_s == pytest.approx(5.0)
    assert stats.gaps.count == 3 and stats.gaps.max_s == pytest.approx(1.0)
    assert stats.num_output_tokens == 4 and stats.last_end_s == pytest.approx(10.0)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_output_ends_at_its_length_and_not_at_the_limit(is_asynchronous: bool) -> None:
    cost = flat_cost(is_asynchronous=is_asynchronous)
    simulation = simulate([request(0.0, 10, 5, max_new_tokens=50)], cost=cost)
    stats = simulation.statistics
    assert stats.num_output_tokens == 5 and stats.gaps.count == 4 and stats.gaps.max_s == pytest.approx(1.0)
    assert simulation.device.num_steps == 5 + is_asynchronous, "with overlap, a step is under way when the end is seen"


def test_the_pause_of_a_retracted_request_is_a_token_gap() -> None:
    """Two requests outgrow the pool. One of them waits for the other."""
    simulation = simulate(
        [request(0.0, 20, 100, max_new_tokens=100), request(0.001, 20, 100, max_new_tokens=100)],
        max_total_tokens=150,
        schedule_conservativeness=0.1,
        admission_watermark=0.0,
    )
    stats = simulation.statistics
    assert simulation.num_retractions == 1 and stats.num_completed == 2
    assert stats.gaps.count == 2 * 99, "no gap is lost"
    assert stats.gaps.max_s > 10


def test_a_held_back_request_counts_from_the_moment_of_sending() -> None:
    requests = [request(0.001 * i, 10, 4) for i in range(6)]
    simulation = simulate(requests, max_concurrency=2)
    assert simulation.max_live == 2
    assert simulation.statistics.num_completed == 6
    assert simulation.statistics.ttft.max_s <= 2.0


def test_a_client_that_leaves_ends_its_request() -> None:
    stats = simulate([request(0.0, 10, 400, aborts_after_s=3.5), request(0.5, 10, 4)]).statistics
    assert (stats.num_aborted, stats.num_completed, stats.num_refused) == (1, 1, 0)
    assert stats.last_end_s < 10


def test_a_client_whose_answer_comes_before_it_would_leave_delays_nothing() -> None:
    """The run ends with the last request, and its rates are those of that time."""
    run = Run.of(simulate([request(0.0, 10, 4, aborts_after_s=9000.0), request(0.5, 10, 4)]))
    assert (run.statistics.num_aborted, run.statistics.num_completed) == (0, 2)
    assert run.duration_s == pytest.approx(run.statistics.last_end_s)
    assert run.values()["request_throughput"] == pytest.approx(2 / run.statistics.last_end_s)


def test_requests_that_never_fit_are_refused() -> None:
    stats = simulate([request(0.0, 500, 20), request(0.1, 10, 4)]).statistics
    assert (stats.num_refused, stats.num_completed) == (1, 1)


def test_goodput_counts_requests_within_all_objectives() -> None:
    requests = [request(0.0, 10, 4), request(20.0, 10, 8)]
    stats = simulate(requests, slos_s={"ttft": 2.0, "e2el": 6.0}).statistics
    assert stats.num_good == 1 and stats.num_completed == 2


def test_fairness_is_that_of_the_speeds_of_tenants() -> None:
    alone = simulate([request(0.0, 10, 8, tenant=0)])
    assert alone.statistics.fairness is None
    equal = simulate([request(0.0, 10, 8, tenant=0), request(50.0, 10, 8, tenant=1)])
    assert equal.statistics.fairness == pytest.approx(1.0)
    one_waits = [request(0.0, 10, 60, tenant=0), request(0.5, 10, 4, tenant=1)]
    assert simulate(one_waits, max_running_requests=1).statistics.fairness == pytest.approx(0.58, abs=0.08)


def test_agents_find_their_conversation_in_the_cache() -> None:
    simulation = simulate(
        agents(
            traffic_settings(num_requests=3, input_len=Span(40, 40), output_len=Span(20, 20)),
            turns=Span(4, 4),
            tool_len=Span(10, 20),
            tool_s=3.0,
        ),
        num_traced=1000,
    )
    assert simulation.statistics.num_completed == 12
    rates = simulation.hit_rates()
    assert rates is not None and rates.num_requests == 12
    assert rates.found == rates.best > 0.5, "in a large pool, the cache has all that was ever computed"


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_the_same_seed_gives_the_same_figures(is_asynchronous: bool) -> None:
    def figures(seed: int) -> dict[str, object]:
        traffic = traffic_settings(
            num_requests=60, burstiness=0.3, length_sigma=0.8, input_len=Span(8, 30), output_len=Span(2, 10),
            abort_share=0.2, num_tenants=3, tenant_skew=1.0, seed=seed,
        )  # fmt: skip
        requests = prefix_tree(traffic, levels=2, branching=2, level_len=24, skew=1.0)
        cost = flat_cost(0.5, 0.01, is_asynchronous=is_asynchronous)
        return {**Run.of(simulate(requests, cost=cost, num_traced=60)).values(), "cpu_s": None}

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


@given(st.integers(0, 1000), st.sampled_from([1, 8]), st.sampled_from(["lpm", "fcfs", "dfs-weight"]), st.booleans())
def test_no_policy_finds_more_than_the_optimum(seed: int, page_size: int, policy: str, is_asynchronous: bool) -> None:
    traffic = traffic_settings(num_requests=15, input_len=Span(1, 40), output_len=Span(1, 8), seed=seed)
    simulation = simulate(
        prefix_tree(traffic, levels=2, branching=3, level_len=40, skew=0.5),
        cost=flat_cost(0.3, is_asynchronous=is_asynchronous),
        num_traced=15,
        page_size=page_size,
        schedule_policy=policy,
        max_total_tokens=512,
        max_running_requests=4,
    )
    rates = simulation.hit_rates()
    assert rates is not None and 0 <= rates.found <= rates.best < 1
    assert simulation.num_retractions or rates.found == pytest.approx(simulation.statistics.hit_rate)


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    """Requests exist only while they are live, and the next one."""
    made: list[int] = []

    def counted() -> object:
        for one in random_prompts(traffic_settings(num_requests=600, output_len=Span(2, 2), input_len=Span(4, 9))):
            made.append(1)
            yield one

    simulation = simulate(counted(), cost=flat_cost(0.2))  # type: ignore[arg-type]
    assert len(made) == simulation.statistics.num_completed == 600
    assert simulation.max_live <= 16
    assert len(simulation.live) == 0 and simulation.hit_rates() is None


def test_the_generator_is_not_run_ahead() -> None:
    """A request is made when the one before it is taken, however many follow."""
    made = 0
    seen = []

    def counted() -> object:
        nonlocal made
        for i in range(100):
            made += 1
            seen.append(made)
            yield request(float(i * 10), 4, 2)

    traffic = Traffic(counted())  # type: ignore[arg-type]
    for number in range(50):
        (taken,) = traffic.take(traffic.next_s or 0.0)
        assert taken.number == number and made == number + 2


def test_dlpm_shares_the_engine_among_the_simulated_tenants() -> None:
    def wait_s(policy: str) -> float:
        many = [request(i / 1000, 100, 4) for i in range(40)]
        simulation = simulate([*many, request(0.5, 100, 4, tenant=1)], schedule_policy=policy, max_running_requests=2)
        return simulation.statistics.tenant_s[1]

    assert wait_s("dlpm") < wait_s("lpm") / 4
