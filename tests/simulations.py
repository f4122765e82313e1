"""Small simulations, for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tercet.benchmarks.presets import load_shape
from tercet.benchmarks.simulator.cost import DeviceProfile
from tercet.benchmarks.simulator.simulation import Simulation
from tercet.benchmarks.simulator.statistics import RunStatistics
from tercet.benchmarks.simulator.synthetic import TrafficSettings
from tercet.benchmarks.simulator.traffic import SimRequest, Traffic
from tercet.managers.step_cost import StepCost
from tercet.srt.server_args import ServerArgs

MODEL = load_shape("smollm2-135m")


def flat_cost(step_s: float = 1.0, token_s: float = 0.0, *, is_asynchronous: bool = False) -> DeviceProfile:
    """Every step takes `step_s`, and `token_s` for each prompt token."""
    return DeviceProfile.of("flat", StepCost(step_s, 0.0, 0.0, token_s, 0.0, 0.0), is_asynchronous=is_asynchronous)


def settings(**changed: object) -> ServerArgs:
    given = {
        "model_path": "none",
        "page_size": 1,
        "context_length": 512,
        "max_running_requests": 16,
        "max_prefill_tokens": 256,
        "chunked_prefill_size": 128,
        "max_total_tokens": 2048,
        "random_seed": 0,
        **changed,
    }
    return ServerArgs(**given)  # type: ignore[arg-type]


def traffic_settings(**changed: object) -> TrafficSettings:
    return TrafficSettings(**{"num_requests": 40, "request_rate": 2.0, "vocab_size": 1000, **changed})  # type: ignore[arg-type]


def simulate(
    requests: Iterable[SimRequest],
    *,
    cost: DeviceProfile | None = None,
    max_concurrency: int | None = None,
    num_traced: int = 0,
    slos_s: dict[str, float] | None = None,
    **changed: object,
) -> Simulation:
    """A run that has ended. `changed`: settings of the server."""
    simulation = Simulation(
        settings(**changed),
        MODEL,
        cost or flat_cost(),
        Traffic(iter(requests), max_concurrency),
        RunStatistics(slos_s or {}),
        num_traced,
    )
    simulation.run()
    assert not simulation.live and not simulation.scheduler.queues.is_busy
    simulation.scheduler.kv.audit([])
    return simulation


def request(arrival_s: float, num_prompt: int, num_output: int, **more: object) -> SimRequest:
    """A request whose prompt starts with a token of its own."""
    prompt = np.arange(num_prompt, dtype=np.int32) + 1
    prompt[0] = 1 + int(arrival_s * 1000) % 40_000
    return SimRequest(arrival_s, prompt, num_output, **more)  # type: ignore[arg-type]
