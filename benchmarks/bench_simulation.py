"""Check the simulator against the real server: the same requests, measured and simulated.

    tercet bench simulation --workloads W1,W2,tree

For each workload, a server of the default model records its schedule while a client sends the requests, 16 at once.
The cost of a step is fitted to the recorded steps, and the time outside the scheduler to single requests that are sent
before. The same requests are simulated with both. The simulated planner begins with what the recorded one had learned,
simulated steps scatter around their cost as the recorded ones, and requests that the scheduler read at once arrive at
once. From the second round on, the workload is also simulated with the step times of the round before, so the
simulation knows none of the times that it predicts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..srt.model_files.default_model import default_model_settings
from ..srt.model_files.load_config import load_model_config
from ..srt.schedule_record import Recording
from .argument_types import benchmark_parser, names, not_negative_int, positive
from .backends import BACKENDS, Output, RequestSettings
from .http_client import HttpClient, api_key_header
from .offline_workloads import Span
from .results import Result, Table, add_results_arguments, finish, number, percent
from .server_process import Server, ServerFailed, ended_by_signals, free_port, last_lines, running_server
from .simulator.comparison import compare, learned
from .simulator.replay import Replay
from .simulator.replay_report import fit_errors
from .simulator.simulation import Simulation
from .simulator.statistics import RunStatistics, Served
from .simulator.synthetic import TrafficSettings, prefix_tree, random_prompts
from .simulator.traffic import SimRequest, Traffic
from .traffic import drive
from .workloads import Request

_CONCURRENCY = 16
_NUM_WARMUPS = 16
_NUM_PROBES = 5
"""Single requests of one token, whose time outside the scheduler is measured."""
_LATE_S = 1e-3
"""When the requests of the first burst arrive that the idle scheduler does not read at once: its first step runs."""
_READY_TIMEOUT_S = 300.0
_TIMEOUT_S = 600.0


def _shared(num_requests: int, own: int, output: int, levels: int, branching: int, level_len: int) -> _Make:
    return lambda vocab_size, seed: prefix_tree(
        _settings(num_requests, own, output, vocab_size, seed), levels, branching, level_len, skew=0.0
    )


def _settings(num_requests: int, own: int, output: int, vocab_size: int, seed: int) -> TrafficSettings:
    return TrafficSettings(
        num_requests=num_requests,
        request_rate=float("inf"),
        input_len=Span(own, own),
        output_len=Span(output, output),
        vocab_size=vocab_size,
        seed=seed,
    )


_Make = Callable[[int, int], Iterator[SimRequest]]
"""Makes requests of a vocabulary size and a seed."""
WORKLOADS: dict[str, _Make] = {
    "W1": lambda vocab_size, seed: random_prompts(_settings(32, 256, 128, vocab_size, seed)),
    "W2": _shared(32, 128, 64, levels=1, branching=1, level_len=896),
    "tree": _shared(48, 32, 32, levels=2, branching=3, level_len=256),
}
"""W1 and W2 are those of `tercet bench compare`."""


@dataclass(frozen=True)
class Figures:
    """What is compared."""

    output_throughput: float
    median_ttft_s: float


@dataclass
class _ExactStatistics(RunStatistics):
    """Keeps each TTFT: the median of few requests may be between two distant ones, as the client computes it."""

    ttfts_s: list[float] = field(default_factory=list)

    def add(self, served: Served) -> None:
        super().add(served)
        if served.first_token_s is not None:
            self.ttfts_s.append(served.first_token_s - served.arrival_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check. Returns the exit code: 1 if a server failed, 130 if a signal interrupted it."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        chosen = names("--workloads", options.workloads, WORKLOADS)
        model_path = options.model_path or default_model_settings()["model_path"]
        vocab_size = load_model_config(model_path, "auto").vocab_size
    except (OSError, ValueError) as error:
        parser.error(str(error))
    result = Result("simulation", "The simulator against the server", parser.prog, argv, None)
    table = result.table(
        "Measured by the client, and simulated",
        [
            "workload", "output tok/s", "simulated", "error", "other round", "TTFT p50, ms", "simulated", "error",
            "without scatter", "other round", "steps", "step error",
        ],
    )  # fmt: skip
    last: dict[str, Replay] = {}
    for round_number, name in itertools.product(range(1, options.rounds + 1), chosen):
        try:
            with ended_by_signals(), tempfile.TemporaryDirectory(prefix="tercet-check-") as folder:
                done = run_round(WORKLOADS[name], Path(folder), model_path, vocab_size, options.seed, last.get(name))
        except ServerFailed as error:
            sys.stderr.write(f"{name}: {error}\n{error.log}\n")
            return 1
        except ValueError as error:
            sys.stderr.write(f"{name}: {error}\n")
            return 1
        except KeyboardInterrupt:
            return 130
        sys.stderr.write(f"{name}: measured {done.measured}, simulated {done.simulated}\n")  # a run may be cut short
        last[name] = done.replay
        result.values[name if options.rounds == 1 else f"{name}, round {round_number}"] = _add_row(table, name, done)
    finish(result, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("simulation", __doc__)
    parser.add_argument("--model-path", metavar="PATH", help="model (default: the installed default model)")
    parser.add_argument("--workloads", metavar="A,B", default="W1,W2,tree", help="workloads (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=positive, default=1, metavar="N", help="runs of each workload, in turns (default: 1)"
    )
    parser.add_argument("--seed", type=not_negative_int, default=0, help="seed of the prompts (default: 0)")
    add_results_arguments(parser)
    return parser


def _add_row(table: Table, name: str, done: Round) -> dict[str, float | int | None]:
    """Adds the row of a workload. Returns its values."""
    replay, measured, simulated, smooth, predicted = done
    found = compare(replay)
    if found.difference is not None:
        table.notes.append(f"{name}: {found.num_equal} of {found.num_recorded} steps equal. {found.difference}")
    step_error, _ = fit_errors(replay, replay.fit(name))
    table.row(
        name,
        number(measured.output_throughput), number(simulated.output_throughput),
        *(_error("output_throughput", figures, measured) for figures in (simulated, predicted)),
        *(number(figures.median_ttft_s * 1000) for figures in (measured, simulated)),
        *(_error("median_ttft_s", figures, measured) for figures in (simulated, smooth, predicted)),
        str(len(replay.script.steps)), percent(step_error),
    )  # fmt: skip
    return {
        "output_throughput": measured.output_throughput,
        "simulated_output_throughput": simulated.output_throughput,
        "median_ttft_ms": measured.median_ttft_s * 1000,
        "simulated_median_ttft_ms": simulated.median_ttft_s * 1000,
        "median_ttft_ms_without_scatter": smooth.median_ttft_s * 1000,
        "throughput_with_the_fit_of_another_round": None if predicted is None else predicted.output_throughput,
        "median_ttft_ms_with_the_fit_of_another_round": None if predicted is None else predicted.median_ttft_s * 1000,
        "equal_steps": found.num_equal,
        "steps": found.num_recorded,
        "median_step_error": step_error,
    }


def _error(name: str, simulated: Figures | None, measured: Figures) -> str:
    return "" if simulated is None else percent(getattr(simulated, name) / getattr(measured, name) - 1)


class Round(NamedTuple):
    """One run of a workload."""

    replay: Replay
    measured: Figures
    simulated: Figures
    smooth: Figures
    """without scatter"""
    predicted: Figures | None
    """with the step times of another run, if there was one"""


def run_round(make: _Make, folder: Path, model_path: str, vocab_size: int, seed: int, other: Replay | None) -> Round:
    """Measures and simulates one run of a workload. `other`: an earlier run.

    Raises ServerFailed, and ValueError as `simulate`.
    """
    path = folder / "schedule"
    port = free_port()
    argv = [sys.executable, "-m", "tercet", "serve", model_path, "--skip-tokenizer-init", "--log-level", "warning"]
    argv += ["--port", str(port), "--record-schedule", str(path)]
    log = folder / "log"
    with running_server(argv, {}, log) as server:
        try:
            measured, probes_s = asyncio.run(_measure(server, port, make, vocab_size, seed))
        except ServerFailed as error:
            error.log = last_lines(log)  # read before the server is stopped, because it logs its shutdown
            raise
    replay = Replay(Recording(path))
    round_trip_s = _round_trip_s(replay, probes_s)
    simulated, smooth = (
        simulate(make(vocab_size, seed), replay, round_trip_s, scatters=scatters) for scatters in (True, False)
    )
    predicted = simulate(make(vocab_size, seed), replay, round_trip_s, timed=other) if other else None
    return Round(replay, measured, simulated, smooth, predicted)


def simulate(
    requests: Iterator[SimRequest],
    replay: Replay,
    round_trip_s: float,
    *,
    scatters: bool = True,
    timed: Replay | None = None,
) -> Figures:
    """The figures that a client would measure, with the recorded settings and step times.

    `round_trip_s`: the time of a request outside the scheduler. `scatters`: whether steps scatter around their cost.
    `timed`: another run of the workload, whose step times are used.

    Raises ValueError if this scheduler does not decide as recorded before the workload begins.
    """
    first = _NUM_WARMUPS + _NUM_PROBES
    timed = timed or replay
    fitted = timed.fit("fitted", since=first)
    burst = _late(requests, _num_at_once(replay, first))
    simulation = Simulation(
        replay.server_args(),
        replay.model_config(),
        fitted,
        Traffic(burst, _CONCURRENCY, _round_trips_s(replay, first, round_trip_s)),
        statistics := _ExactStatistics(),
        scatter=timed.scatter(fitted, since=first) if scatters else None,
        learned=learned(replay, first),
    )
    simulation.run()
    return Figures(
        statistics.num_output_tokens / (statistics.last_end_s + round_trip_s),
        float(np.median(statistics.ttfts_s)) + round_trip_s,
    )


def _late(requests: Iterator[SimRequest], num_at_once: int) -> Iterator[SimRequest]:
    for place, request in enumerate(requests):
        request.arrival_s = 0.0 if place < num_at_once else _LATE_S
        yield request


def _num_at_once(replay: Replay, first: int) -> int:
    """The requests from this number on that the scheduler read together. The client sends as many as it may at once.
    How many of them are there when the idle scheduler wakes up is up to the operating system, and the first step of the
    run depends on it."""
    arrivals = replay.arrivals()
    return sum(one.turn == arrivals[first].turn for one in arrivals.values())


def _round_trips_s(replay: Replay, first: int, round_trip_s: float) -> Iterator[float]:
    """The time from each end of a request, since that of this number arrived, to the arrival that follows from it.

    0 if the scheduler read the next request in the turn after the end. Then the operating system had interrupted it for
    longer than the client took. Else the next step has begun before, and it does not matter how long the client took.
    """
    turns = sorted(end.turn for number, end in replay.script.ends.items() if number >= first)
    later = [arrival.turn for number, arrival in sorted(replay.arrivals().items()) if number >= first + _CONCURRENCY]
    known = [0.0 if after == turn + 1 else round_trip_s for turn, after in zip(turns, later, strict=False)]
    return itertools.chain(known, itertools.repeat(round_trip_s))


def _round_trip_s(replay: Replay, probes_s: Sequence[float]) -> float:
    """The median time of the probes outside the scheduler. `probes_s`: their times at the client."""
    arrivals, ends = replay.arrivals(), replay.script.ends
    inside_s = [ends[number].at_s - arrivals[number].at_s for number in range(_NUM_WARMUPS, _NUM_WARMUPS + _NUM_PROBES)]
    return max(float(np.median(np.array(probes_s) - inside_s)), 0.0)


async def _measure(server: Server, port: int, make: _Make, vocab_size: int, seed: int) -> tuple[Figures, list[float]]:
    """The figures, and the times of the probes."""
    client = HttpClient(f"http://127.0.0.1:{port}", api_key_header())
    try:
        await server.wait_until_healthy(client, _READY_TIMEOUT_S)
        warmups = list(itertools.islice(make(vocab_size, seed + 1), _NUM_WARMUPS))
        await _send(client, [Request(one.prompt_ids.tolist(), len(one.prompt_ids), 8) for one in warmups])
        probe = Request(warmups[0].prompt_ids.tolist(), len(warmups[0].prompt_ids), 1)
        probes_s = [(await _send(client, [probe]))[1] for _ in range(_NUM_PROBES)]
        requests = [
            Request(one.prompt_ids.tolist(), len(one.prompt_ids), one.num_output_tokens)
            for one in make(vocab_size, seed)
        ]
        outputs, duration_s = await _send(client, requests)
    finally:
        await client.close()
    num_tokens = sum(output.completion_tokens or 0 for output in outputs)
    ttfts_s = [output.arrivals[0] - output.start_s for output in outputs]
    return Figures(num_tokens / duration_s, float(np.median(ttfts_s))), probes_s


async def _send(client: HttpClient, requests: Sequence[Request]) -> tuple[list[Output], float]:
    """Raises ServerFailed if a request failed."""
    dialect = BACKENDS["tercet"].dialect(RequestSettings())
    bodies = [dialect.encode(request) for request in requests]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            outputs, duration_s = await drive(client, dialect, bodies, np.zeros(len(bodies)), _CONCURRENCY)
    except TimeoutError:
        raise ServerFailed(f"the answers were not complete after {_TIMEOUT_S:g} s") from None
    for output, request in zip(outputs, requests, strict=True):
        if output.error is not None or output.completion_tokens != request.output_len or not output.arrivals:
            raise ServerFailed(f"a request failed: {output.error or 'its answer has another length'}")
    return outputs, duration_s


if __name__ == "__main__":
    sys.exit(main())
