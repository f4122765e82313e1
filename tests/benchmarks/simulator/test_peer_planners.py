"""The rules of SGLang and vLLM beside Tercet's, in the same simulation."""

from __future__ import annotations

import pytest
from simulations import MODEL, flat_cost, request, settings

from tercet.benchmarks.offline_workloads import Span
from tercet.benchmarks.simulator.cost import PROFILES, DeviceProfile
from tercet.benchmarks.simulator.peer_planners import PLANNERS
from tercet.benchmarks.simulator.simulation import Simulation
from tercet.benchmarks.simulator.statistics import RunStatistics
from tercet.benchmarks.simulator.streams import beside_streams
from tercet.benchmarks.simulator.synthetic import TrafficSettings
from tercet.benchmarks.simulator.traffic import SimRequest, Traffic
from tercet.managers.step_cost import StepShape

FLAT = flat_cost(0.01, 0.001)


class Watched(Simulation):
    """Keeps the shape of each step."""

    _shapes: list[StepShape]

    def on_step(self, shape: StepShape, start_s: float, end_s: float) -> None:
        self.__dict__.setdefault("_shapes", []).append(shape)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(prompt tokens, rows) of each step."""
        return [(shape.num_prompt_tokens, shape.num_rows) for shape in self._shapes]


def run(planner: str, requests: list[SimRequest], profile: DeviceProfile = FLAT, **changed: object) -> Watched:
    simulation = Watched(
        settings(**changed), MODEL, profile, Traffic(iter(requests)), RunStatistics(),
        planner_type=PLANNERS[planner],
    )  # fmt: skip
    simulation.run()
    simulation.scheduler.kv.audit([])
    assert simulation.statistics.num_completed == len(requests)
    return simulation


def beside(num_prompts: int) -> list[SimRequest]:
    """A stream, and prompts that arrive together when it runs."""
    return [request(0.0, 10, 60), *(request(0.1 + place / 1000, 200, 1) for place in range(num_prompts))]


def test_sglangs_rule_decodes_when_no_prompt_can_go_on() -> None:
    simulation = run("sglang-rule", beside(4))
    extends = [place for place, (num_prompt, _) in enumerate(simulation.sizes) if num_prompt]
    assert extends[1:] == list(range(extends[1], extends[-1] + 1)), "no decode step stands between the prompts"
    assert [simulation.sizes[place] for place in extends] == [
        # A chunk is cut to the room of the step, beside the last part of the prompt before it.
        (10, 1), (128, 1), (128, 2), (128, 1), (128, 2), (128, 2), (128, 1), (32, 1),
    ]  # fmt: skip
    assert simulation.statistics.gaps.max_s > 4 * 0.2, "the stream waits for all of them"


def test_vllms_rule_decodes_in_every_step_within_a_fixed_number_of_tokens() -> None:
    simulation = run("vllm-rule", beside(4))
    assert simulation.statistics.gaps.max_s == pytest.approx(0.01 + 0.255)
    assert [one for one in simulation.sizes if one[0]][1:] == [(255, 3), (255, 3), (255, 3), (35, 2)]


def test_memory_is_respected_by_every_planner() -> None:
    traffic = TrafficSettings(
        num_requests=30, request_rate=20.0, input_len=Span(10, 300), output_len=Span(1, 60), vocab_size=1000
    )
    for planner in PLANNERS:
        requests = list(beside_streams(traffic, 3, 100))
        run(planner, requests, max_total_tokens=512, page_size=8, max_running_requests=6, context_length=512)


def test_a_bound_of_one_and_a_half_quiet_steps_costs_no_throughput() -> None:
    """Steady prompts of 2,048 tokens beside 8 streams, at the costs of an 8B model. The peers have no bound."""
    profile = PROFILES["llama-3.1-8b-h100-estimate"]

    def beside_prompts(planner: str, num_prompts: int, **changed: object) -> tuple[float, float]:
        """The p99 of the gaps in seconds, and the tokens per second of prompts and answers."""
        traffic = TrafficSettings(
            num_requests=num_prompts, request_rate=4.0, burstiness=1000.0, input_len=Span(2048, 2048),
            output_len=Span(1, 1), vocab_size=1000,
        )  # fmt: skip
        limits = {"context_length": 4096, "max_total_tokens": 65536, "max_prefill_tokens": 16384}
        requests = list(beside_streams(traffic, 8, 500))
        stats = run(
            planner, requests, profile=profile, chunked_prefill_size=8192, max_running_requests=64, **limits, **changed
        ).statistics  # fmt: skip
        num_tokens = stats.num_output_tokens + stats.num_admitted_tokens
        return stats.gaps.quantile(0.99) or 0.0, num_tokens / stats.last_end_s

    quiet_s, _ = beside_prompts("tercet", 1)
    found = {planner: beside_prompts(planner, 14) for planner in PLANNERS}
    p99_s, throughput = beside_prompts("tercet", 14, max_itl_ms=1500 * quiet_s)
    assert p99_s <= 1.5 * quiet_s
    assert throughput >= 0.95 * max(of_planner for _, of_planner in found.values())
    assert min(found["sglang-rule"][0], found["vllm-rule"][0]) > 5 * quiet_s
