"""Agents that return after tool calls, beside 500 documents that are sent once, in simulated time."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from simulations import flat_cost, request, simulate, traffic_settings

from tercet.benchmarks import bench_scheduler
from tercet.benchmarks.offline_workloads import Span
from tercet.benchmarks.simulator.synthetic import agents, beside_documents
from tercet.benchmarks.simulator.traffic import SimRequest

AGENTS, DOCUMENTS = 0, 1


def traffic(seed: int, num_documents: int = 500) -> Iterator[SimRequest]:
    """Two sessions of 40 turns. The documents are thirty times the pool, and last as long as the sessions."""
    given = traffic_settings(num_requests=2, request_rate=1.0, input_len=Span(64, 64), output_len=Span(4, 4), seed=seed)
    sessions = agents(given, turns=Span(40, 40), tool_len=Span(6, 12), tool_s=8.0)
    return beside_documents(sessions, given, num_documents, Span(200, 400), rate=1.4)


def agents_hit_rate(seed: int, **settings: object) -> float:
    run = simulate(
        traffic(seed), cost=flat_cost(0.02), max_total_tokens=5000, context_length=1024, **settings
    ).statistics
    assert run.num_completed == 580 and run.tenant_hit_rates[DOCUMENTS] < 0.001
    return run.tenant_hit_rates[AGENTS]


@pytest.mark.parametrize("seed", [0, 1])
def test_retention_after_tool_calls_keeps_the_agents_hit_rate(seed: int) -> None:
    assert agents_hit_rate(seed) >= 0.9
    assert agents_hit_rate(seed, radix_eviction_policy="lru") < 0.8


def test_the_time_of_a_retention_passes_while_the_engine_is_idle() -> None:
    requests = [request(0.0, 64, 4, ends_in_tool_call=True), request(1000.0, 64, 4)]
    cache = simulate(requests, cost=flat_cost(0.02)).scheduler.kv.cache
    assert cache.retained_size == 0


def test_documents_are_requests_of_a_tenant_of_their_own_in_the_order_of_arrival() -> None:
    requests = list(traffic(seed=3, num_documents=9))
    assert [request.tenant for request in requests].count(DOCUMENTS) == 9 and len(requests) == 11
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    documents = [request for request in requests if request.tenant == DOCUMENTS]
    assert all(200 <= len(request.prompt_ids) <= 400 and not request.ends_in_tool_call for request in documents)
    assert len({request.prompt_ids.tobytes() for request in documents}) == 9


def test_the_command_compares_eviction_policies(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "--traffic agents --num-requests 2 --turns 3 --input-len 30 --output-len 4 --tool-len 5 --documents 5"
    argv += " --document-len 20-30 --policies fcfs --eviction-policies value,lru"
    assert bench_scheduler.main(argv.split()) == 0
    out = capsys.readouterr().out
    assert "Hit rate of each tenant" in out
    runs = json.loads(out.splitlines()[-1])["runs"]
    assert list(runs) == ["fcfs, value", "fcfs, lru"]
    assert all(one["completed"] == 11 and set(one["tenant_hit_rates"]) == {"0", "1"} for one in runs.values())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--eviction-policies lru,best", "--eviction-policies: 'best' is none of value, lru"),
        ("--documents 5", "--documents has no effect with --traffic random"),
    ],
)
def test_what_has_no_meaning_is_refused(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_scheduler.main(argv.split())
    assert message in capsys.readouterr().err
