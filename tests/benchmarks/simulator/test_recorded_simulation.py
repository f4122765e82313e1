"""A simulated server with noisy steps is recorded. A simulation of the recording has the figures of that server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from recorded_schedules import Recorded
from simulations import MODEL, flat_cost, request, settings, simulate

from tercet.benchmarks import bench_simulation
from tercet.benchmarks.simulator import simulation as simulation_module
from tercet.benchmarks.simulator.cost import PROFILES
from tercet.benchmarks.simulator.replay import Replay
from tercet.benchmarks.simulator.scatter import Scatter
from tercet.benchmarks.simulator.simulation import Simulation
from tercet.benchmarks.simulator.statistics import RunStatistics
from tercet.benchmarks.simulator.traffic import SimRequest, Traffic
from tercet.managers.engine_view import StepLog
from tercet.managers.schedule_recorder import ScheduleRecorder, SchedulerEnds
from tercet.managers.scheduler import Scheduler
from tercet.managers.scheduler_io import SchedulerIO
from tercet.managers.step_cost import StepShape
from tercet.srt.io_struct import GenerateReq, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.schedule_record import Recording

START_S = 100.0
ROUND_TRIP_S = 0.005
NUM_AT_ONCE = 5
"""Of the first requests. The idle scheduler reads them together."""
SHARE_AT_ONCE = 0.3
"""Of the requests that follow from the end of another one. The scheduler reads them in its next turn."""
NOISE = 0.06
"""Standard deviation of the logarithms of the times of equal steps, as on an idle machine."""
ARGS = settings(
    context_length=2048,
    max_running_requests=32,
    max_prefill_tokens=2048,
    chunked_prefill_size=2048,
    max_total_tokens=65_536,
    max_itl_ms="auto",
)


class Statistics(bench_simulation._ExactStatistics):
    """Of the workload alone."""

    def add(self, served: object) -> None:
        if served.arrival_s >= START_S:  # type: ignore[attr-defined]
            super().add(served)  # type: ignore[arg-type]


def requests(name: str) -> Iterator[SimRequest]:
    """The requests that the check sends: warm-ups, probes and the workload."""
    make = bench_simulation.WORKLOADS[name]
    warmups = list(itertools.islice(make(MODEL.vocab_size, 1), bench_simulation._NUM_WARMUPS))
    for warmup in warmups:
        warmup.num_output_tokens = 8
        yield warmup
    for number in range(bench_simulation._NUM_PROBES):
        yield SimRequest(60.0 + 2 * number, warmups[0].prompt_ids, 1)
    for place, one in enumerate(make(MODEL.vocab_size, 0)):
        one.arrival_s = START_S if place < NUM_AT_ONCE else START_S + 0.002
        yield one


def record(path: Path, name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Records a server. Returns the median TTFT of the workload, without the time outside the scheduler."""
    recorders = []
    build = simulation_module.build_scheduler

    def build_recorded(server_args, config, device, tokenizer, io, clock, **more) -> Scheduler:  # type: ignore[no-untyped-def]
        recorder = ScheduleRecorder(path, server_args, config, device, clock)
        recorders.append(recorder)
        ends = recorder.wrap(SchedulerEnds(io._inbox, io._detokenizer, StepLog(clock)))
        io = SchedulerIO(ends.inbox, ends.outbox, io._tokenizer, clock)
        return build(server_args, config, device, tokenizer, io, clock, **{**more, "step_log": ends.step_log})

    rng = Random(seed)
    noise = (rng.lognormvariate(0, NOISE) for _ in itertools.count())
    round_trips_s = (0.0 if rng.random() < SHARE_AT_ONCE else ROUND_TRIP_S for _ in itertools.count())
    statistics = Statistics()
    traffic = Traffic(requests(name), bench_simulation._CONCURRENCY, round_trips_s)
    profile = msgspec.structs.replace(PROFILES["smollm2-135m-2-cores"], host_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(simulation_module, "build_scheduler", build_recorded)
        server = Simulation(ARGS, MODEL, profile, traffic, statistics, scatter=Scatter(*itertools.tee(noise)))
    server.run()
    recorders[0].close()
    return float(np.median(statistics.ttfts_s))


@pytest.mark.parametrize("name", bench_simulation.WORKLOADS)
@pytest.mark.parametrize("seed", [2, 4])
def test_the_median_ttft_is_that_of_the_recorded_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    """The noise decides what the planner learns and so what it plans: medians of W1 differ by a factor of four."""
    measured_s = record(tmp_path / "schedule", name, seed, monkeypatch)
    replay = Replay(Recording(tmp_path / "schedule"))
    make = bench_simulation.WORKLOADS[name]
    simulated = bench_simulation.simulate(make(MODEL.vocab_size, 0), replay, ROUND_TRIP_S)
    assert simulated.median_ttft_s == pytest.approx(measured_s + ROUND_TRIP_S, rel=0.05)


def test_the_planner_learns_the_time_of_the_device_without_that_of_the_host() -> None:
    profile = msgspec.structs.replace(flat_cost(1.0), host_s=0.5)
    simulation = simulate([request(0.0, 10, 40)], cost=profile, max_itl_ms="auto")
    assert simulation.statistics.gaps.max_s == pytest.approx(1.5)
    gap = simulation.scheduler.planner.gap
    assert gap is not None
    assert gap.model.cost.seconds(StepShape.of_decode(1, 30)) == pytest.approx(1.0, rel=0.05)


def _next_token(ids: Sequence[int], seed: int, vocab_size: int, weights: int = 0) -> int:
    """0 1 6 7 4 5 2 3, again and again. 5 ends a request."""
    return (int(ids[-1]) * 5 + 1) % 8


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("is_asynchronous", "drafts"), [(True, {}), (False, {"speculative_algorithm": "NGRAM"}), (False, {})]
)
def test_a_simulation_caches_the_last_token_where_the_recorded_server_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asynchronous: bool, drafts: dict[str, object], ignore_eos: bool
) -> None:
    """With overlap or an accepted draft, the cache has a stop token."""
    monkeypatch.setattr("fakes.next_token", _next_token)
    answer = [1, 6, 7, 4, 5, 2, 3, 0]
    first = answer * 3
    then = [*first, *answer, 9]
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, sampling_seed=0, ignore_eos=ignore_eos)
    options = RequestOptions(sampling=sampling)
    sent: dict[int, object] = {
        turn: GenerateReq(str(turn), pack_ids(ids), options) for turn, ids in ((0, first), (40, then))
    }
    path = tmp_path / "schedule"
    Recorded(path, 1, is_asynchronous=is_asynchronous, **drafts).run(
        lambda turn: [sent[turn]] if turn in sent else [], num_turns=80
    )
    replay = Replay(Recording(path))
    (step,) = [step for step in replay.script.steps if step.seq_lens[0] == len(then)]
    num_cached = len(then) - int(step.extend_lens.sum())
    assert num_cached == len(first) + (7 if ignore_eos else 5 if is_asynchronous or drafts else 4)
    statistics = RunStatistics({})
    profile = flat_cost(0.001, is_asynchronous=is_asynchronous)
    Simulation(replay.server_args(), replay.model_config(), profile, Traffic(replay.requests()), statistics).run()
    assert statistics.num_cached_tokens == num_cached
