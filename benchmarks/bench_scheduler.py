"""Simulate a server: the real scheduler against a fake device, in simulated time. No model is loaded.

    python -m tercet.benchmarks.bench_scheduler --traffic prefix-tree --request-rate 4 --policies lpm,fcfs
    python -m tercet.benchmarks.bench_scheduler --traffic mooncake --trace-path trace.jsonl --max-total-tokens 200000

The engine's settings are those of `tercet serve`. The same settings and seed give the same figures on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..managers.schedule_policy import POLICIES
from ..srt.model_files.model_config import ModelConfig
from ..srt.server_args import ServerArgs
from .results import Result, finish
from .simulator.arguments import engine_of, parse, traffic_of
from .simulator.report import Run, add_tables, save_png, terminal_plots
from .simulator.simulation import Simulation
from .simulator.statistics import RunStatistics


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the simulation of each policy. Returns the exit code."""
    program = "python -m tercet.benchmarks.bench_scheduler"
    parser, options = parse(program, argv, __doc__ or "")
    server_args, config = engine_of(parser, options, options.profile)
    policies = options.policies.split(",") if options.policies else [server_args.schedule_policy]
    for policy in policies:
        if policy not in POLICIES:
            parser.error(f"--policies: {policy!r} is none of {', '.join(POLICIES)}")
    result = Result(f"scheduler-{options.traffic}", "Simulation of the scheduler", program, argv, None)
    try:
        runs = {
            policy: _run(dataclasses.replace(server_args, schedule_policy=policy), config, options)
            for policy in policies
        }
    except (OSError, ValueError) as error:
        parser.error(str(error))
    add_tables(result, runs, _traffic_text(options), _engine_text(server_args, options))
    result.values.update(
        traffic=options.traffic,
        seed=options.seed,
        profile=msgspec.structs.asdict(options.profile),
        goodput_slos_ms=options.goodput,
        runs={policy: run.values() for policy, run in runs.items()},
    )
    if options.plot is not None:
        sys.stdout.write("\n" + terminal_plots(runs, shutil.get_terminal_size().columns))
    if options.plot:
        save_png(Path(options.plot), _traffic_text(options), runs)
    finish(result, options)
    return 0


def _run(server_args: ServerArgs, config: ModelConfig, options: argparse.Namespace) -> Run:
    slos_s = {name: limit_ms / 1000 for name, limit_ms in options.goodput.items()}
    simulation = Simulation(
        server_args,
        config,
        options.profile,
        traffic_of(options, config.vocab_size),
        RunStatistics(slos_s),
        num_traced=options.optimum_requests,
    )
    simulation.run()
    return Run.of(simulation)


def _traffic_text(options: argparse.Namespace) -> str:
    count = "all" if options.num_requests is None else f"{options.num_requests:,}"
    what = "sessions" if options.traffic == "agents" else "requests"
    return f"Traffic {options.traffic}, {count} {what}, seed {options.seed}"


def _engine_text(server_args: ServerArgs, options: argparse.Namespace) -> str:
    return (
        f"Cost model {options.profile.name}; KV pool of {server_args.max_total_tokens:,} tokens in pages of "
        f"{server_args.page_size}, context {server_args.context_length}, {server_args.max_running_requests} running "
        f"requests, {server_args.max_prefill_tokens} prompt tokens per step, {server_args.chunked_prefill_size} in a "
        "chunk"
    )


if __name__ == "__main__":
    sys.exit(main())
