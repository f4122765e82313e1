"""Simulate a server: the real scheduler against a fake device, in simulated time. No model is loaded.

    tercet bench scheduler --traffic prefix-tree --request-rate 4 --policies lpm,fcfs
    tercet bench scheduler --replay recorded.schedule --policies lpm,fcfs
    tercet bench scheduler --traffic streams --request-rate 0.1 --input-len 2048 \\
        --max-itl-ms 100 --planners tercet,sglang-rule,vllm-rule
    tercet bench scheduler --traffic mooncake --trace-path trace.jsonl \\
        --max-total-tokens 200000 --context-length 131072

The engine's settings are those of `tercet serve`. The same settings and seed give the same figures on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..managers.schedule_policy import POLICIES
from ..mem_cache.evict_policy import EVICT_POLICIES
from ..srt.model_files.model_config import ModelConfig
from ..srt.schedule_record import Recording
from ..srt.server_args import ServerArgs
from ..srt.settings.checks import RETENTION_SETTINGS
from .argument_types import names
from .results import Result, finish
from .simulator.arguments import check_drafts, check_prompts_fit, engine_of, parse, replayed_args, traffic_of
from .simulator.comparison import compare
from .simulator.cost import DeviceProfile, save_profile
from .simulator.peer_planners import PLANNERS, TERCET
from .simulator.replay import Replay
from .simulator.replay_report import add_replay_table
from .simulator.report import Run, add_tables, save_png, terminal_plots
from .simulator.simulation import Simulation
from .simulator.statistics import RunStatistics
from .simulator.traffic import Traffic


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    server_args: ServerArgs
    config: ModelConfig
    profile: DeviceProfile
    traffic: Callable[[], Traffic]
    """Makes the traffic from its beginning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the simulation of each policy. Returns the exit code: 1 if a run refused all requests."""
    parser, options = parse(argv, __doc__)
    result = Result(f"scheduler-{options.traffic}", "Simulation of the scheduler", parser.prog, argv, None)
    try:
        if options.replay is not None:
            case = _replayed(options, result)
        else:
            server_args, config = engine_of(parser, options, options.profile)
            check_prompts_fit(options, server_args)
            case = Case(server_args, config, options.profile, lambda: traffic_of(options, config.vocab_size))
        check_drafts(case.server_args, case.profile, is_replay=options.replay is not None)
        runs = _runs(case, options)
    except OSError as error:
        parser.error(f"cannot read {error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        parser.error(str(error))
    add_tables(result, runs, _traffic_text(options), _engine_text(case))
    max_resident_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result.tables[-1].notes.append(f"Resident memory of this process: {max_resident_mib:.0f} MiB at most")
    result.values.update(
        max_resident_mib=max_resident_mib,
        traffic=options.traffic,
        seed=options.seed,
        profile=msgspec.structs.asdict(case.profile),
        goodput_slos_ms=options.goodput,
        runs={policy: run.values() for policy, run in runs.items()},
    )
    plots = "" if options.plot is None else "\n" + terminal_plots(runs, shutil.get_terminal_size().columns)
    try:
        finish(result, options, plots)
    finally:
        try:
            if options.save_cost is not None:
                save_profile(case.profile, options.save_cost)
            if options.plot:
                save_png(Path(options.plot), _traffic_text(options), runs)
        except OSError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
    all_stats = [run.statistics for run in runs.values()]
    return 0 if all(stats.num_completed or stats.num_aborted for stats in all_stats) else 1


def _replayed(options: argparse.Namespace, result: Result) -> Case:
    """The case of a recording. Compares its decisions and fits its steps, and reports both. Raises ValueError."""
    replay = Replay(Recording(options.replay))
    fitted = replay.fit(f"fitted to {options.replay.name}")
    add_replay_table(result, replay, compare(replay) if replay.recording.is_whole else None, fitted)
    profile = fitted if options.cost is None else options.profile
    return Case(replayed_args(options, replay), replay.model_config(), profile, lambda: Traffic(replay.requests()))


def _runs(case: Case, options: argparse.Namespace) -> dict[str, Run]:
    policies: list[Any] = names("--policies", _given(options.policies, case.server_args.schedule_policy), POLICIES)
    planners = names("--planners", options.planners, PLANNERS)
    default_eviction = case.server_args.radix_eviction_policy
    evictions: list[Any] = names(
        "--eviction-policies", _given(options.eviction_policies, default_eviction), EVICT_POLICIES
    )
    slos_s = {name: limit_ms / 1000 for name, limit_ms in options.goodput.items()}
    runs = {}
    for policy, planner, eviction in itertools.product(policies, planners, evictions):
        server_args = _with_policies(case.server_args, policy, eviction)
        statistics = RunStatistics(slos_s)
        simulation = Simulation(
            server_args,
            case.config,
            case.profile,
            case.traffic(),
            statistics,
            options.optimum_requests,
            PLANNERS[planner],
        )
        simulation.run()
        parts = policy, planner if planner != TERCET else "", eviction if options.eviction_policies else ""
        runs[", ".join(filter(None, parts))] = Run.of(simulation)
    return runs


def _given(names: str | None, default: str) -> str:
    return default if names is None else names


def _with_policies(args: ServerArgs, policy: Any, eviction: Any) -> ServerArgs:
    """The settings with these policies, without settings that only other policies have."""
    ignored: tuple[str, ...] = () if policy == "dlpm" else ("tenant_weights",)
    ignored += () if eviction == "value" else RETENTION_SETTINGS
    defaults = {name: getattr(ServerArgs, name) for name in ignored}
    return dataclasses.replace(args, schedule_policy=policy, radix_eviction_policy=eviction, **defaults)


def _traffic_text(options: argparse.Namespace) -> str:
    if options.replay is not None:
        return f"The requests of {options.replay.name}"
    count = "all" if options.num_requests is None else f"{options.num_requests:,}"
    what = "sessions" if options.traffic == "agents" else "requests"
    return f"Traffic {options.traffic}, {count} {what}, seed {options.seed}"


def _engine_text(case: Case) -> str:
    server_args = case.server_args
    return (
        f"Cost model {case.profile.name}; KV pool of {server_args.max_total_tokens:,} tokens in pages of "
        f"{server_args.page_size}, context {server_args.context_length}, {server_args.max_running_requests} running "
        f"requests, {server_args.max_prefill_tokens} prompt tokens per step, {server_args.chunked_prefill_size} in a "
        "chunk"
    )


if __name__ == "__main__":
    sys.exit(main())
