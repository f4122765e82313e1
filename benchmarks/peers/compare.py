"""Compare Tercet with other servers: the implementation of `tercet bench compare`.

The servers run one after another, on the same machine and model files. The same client sends the same token ids to
each. The order is reversed in every second round. benchmarks/peers/README.md says how to install the servers. Linux
only.

Every server is started again for each round and model. So each has the whole memory for itself, its caches have not
seen the prompts, and every round gives one start-up time. Start-up is not part of the measured throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from ...srt.machine.standard_files import open_standard_files
from ..argument_types import above_zero, not_negative, positive
from ..results import Result, add_results_arguments, finish, number, output_folder, percent
from ..server_process import ServerFailed, run_to_end
from .comparison import SAMPLE, Comparison, Peer, Plan
from .engines import ENGINES, OWN_PYTHON, TERCET, find_on_path, locate
from .model_files import DEFAULT, TOY, model_files
from .workload import WORKLOADS, Workload

_PROGRAM = "tercet bench compare"
_MAKE_MODELS = [str(OWN_PYTHON), "-m", "tercet.benchmarks.peers.models"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison and returns the exit code. All results so far are shown in any case.

    0: every server finished every workload. 1: something failed. 130: interrupted.
    """
    open_standard_files()
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        peers = _peers(args)
        for name in (DEFAULT, TOY):
            if not model_files(name, args.models).complete:
                _say(f"making the models in {args.models}")
                run_to_end([*_MAKE_MODELS, str(args.models)])
    except ValueError as error:
        parser.error(str(error))
    except ServerFailed as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return 1
    with contextlib.ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tercet-compare-")))
        logs.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(_plan(args, peers, logs), _say)
        interrupted = _run(comparison)
    result = Result("compare", "Tercet compared with other servers", _PROGRAM, argv, None)
    _fill(result, comparison)
    finish(result, args)
    return 130 if interrupted else 1 if comparison.failures else 0


def _run(comparison: Comparison) -> bool:
    """Runs the comparison. Returns whether Ctrl-C or SIGTERM interrupted it."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
                asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
        await comparison.run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        return True
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage="%(prog)s [options]",
        description="Measure Tercet and other servers side by side, each started in turn on the same model files.",
    )
    parser.add_argument(
        "--models",
        metavar="DIR",
        type=Path,
        required=True,
        help="folder of the model files, which are created if missing",
    )
    parser.add_argument(
        "--peer",
        metavar="NAME=PATH",
        action="append",
        type=_named,
        default=[],
        help=f"server ({', '.join(ENGINES)}) and the path of its program or environment "
        "(default: vllm and llama-server, if they are on PATH)",
    )
    parser.add_argument(
        "--args",
        metavar="NAME=FLAGS",
        action="append",
        type=_named,
        default=[],
        help="further flags for the server NAME",
    )
    parser.add_argument(
        "--workloads",
        metavar="NAMES",
        type=_workloads,
        default=list(WORKLOADS.values()),
        help="workloads to run (default: W1,W2,W3,W4)",
    )
    parser.add_argument("--rounds", type=positive, help="number of rounds (default: 5; with --quick: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="send few and short requests, to try whether everything works"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument(
        "--ready-timeout-s", type=above_zero, default=300.0, help="maximum seconds for a start (default: 300)"
    )
    parser.add_argument(
        "--timeout-s", type=above_zero, default=600.0, help="maximum seconds for one measurement (default: 600)"
    )
    parser.add_argument(
        "--max-other-load",
        metavar="SHARE",
        type=not_negative,
        default=0.05,
        help="repeat a measurement, at most twice, if other processes used a larger share of the cores (default: 0.05)",
    )
    parser.add_argument("--logs", metavar="DIR", type=output_folder, help="write the servers' logs to this folder")
    add_results_arguments(parser)
    return parser


def _plan(args: argparse.Namespace, peers: Sequence[Peer], logs: Path) -> Plan:
    workloads = [workload.quick() if args.quick else workload for workload in args.workloads]
    return Plan(
        peers=peers,
        workloads=workloads,
        models={
            name: model_files(name, args.models) for name in dict.fromkeys(workload.model for workload in workloads)
        },
        num_rounds=args.rounds or (1 if args.quick else 5),
        seed=args.seed,
        ready_timeout_s=args.ready_timeout_s,
        timeout_s=args.timeout_s,
        max_other_load=1.0 if args.quick else args.max_other_load,
        logs=logs,
    )


def _peers(args: argparse.Namespace) -> list[Peer]:
    """The servers to compare, Tercet first.

    Raises ValueError, and ServerFailed when a program does not report its version.
    """
    places = {TERCET: OWN_PYTHON, **(dict(args.peer) or find_on_path())}
    if len(dict(args.peer)) < len(args.peer):
        raise ValueError("--peer names a server twice")
    flags: dict[str, list[str]] = {}
    for name, words in args.args:
        flags.setdefault(name, []).extend(shlex.split(words))
    for name in {*places, *flags} - ENGINES.keys():
        raise ValueError(f"unknown server {name!r}; known servers: {', '.join(ENGINES)}")
    for name in flags.keys() - places.keys():
        raise ValueError(f"--args names {name}, which is not measured")
    peers = []
    for name, place in places.items():
        engine = ENGINES[name]
        program = locate(engine, Path(place))
        peers.append(Peer(name, engine, program, engine.version(program), flags.get(name, [])))
    return peers


def _fill(result: Result, comparison: Comparison) -> None:
    plan = comparison.plan
    for workload in plan.workloads:
        _add_workload(result, comparison, workload)
    _add_starts(result, comparison)
    result.values = {
        "peers": {peer.name: {"version": peer.version} for peer in plan.peers},
        "num_rounds": plan.num_rounds,
        "seed": plan.seed,
        "starts": comparison.starts,
        "runs": comparison.runs,
        "failures": [
            {"peer": peer, "workload": workload, "message": failure.message, "log": failure.log}
            for (peer, workload), failure in comparison.failures.items()
        ],
    }


def _add_workload(result: Result, comparison: Comparison, workload: Workload) -> None:
    table = result.table(
        f"{workload.title}: medians",
        ["server", "output tok/s", "Tercet's / its", "TTFT ms", "TPOT ms", "server CPU s", "client CPU s", "rounds"],
    )
    max_other_share = 0.0
    for peer in comparison.plan.peers:
        runs = _runs(comparison, peer, workload)
        failure = comparison.failures.get((peer.name, workload.name))
        if failure is not None:
            table.row(peer.name, "failed", *["-"] * 5, str(len(runs)))
            table.notes.append(_failure_note(peer.name, failure.message, failure.log))
            continue
        if not runs:
            table.row(peer.name, *["-"] * 6, "0")
            continue
        max_other_share = max(max_other_share, *(run["others_share"] for run in runs))
        speeds = [run["output_throughput"] for run in runs]
        table.row(
            peer.name,
            f"{number(_median(speeds))} ({number(min(speeds))}-{number(max(speeds))})",
            number(_ratio(comparison, peer, workload)),
            *(
                number(_median(run[name] for run in runs))
                for name in ("median_ttft_ms", "median_tpot_ms", "server_cpu_s", "client_cpu_s")
            ),
            str(len(runs)),
        )
        table.notes.extend(_cpu_note(peer.name, runs))
    table.notes.append(f"Other processes took at most {percent(max_other_share)} of the cores during a measurement.")


def _add_starts(result: Result, comparison: Comparison) -> None:
    table = result.table(
        "Starts and memory: medians",
        [
            "server",
            "version",
            "model",
            "dtype",
            "exec to first token s",
            "PSS idle GiB",
            "PSS after work GiB",
            "KV pool GiB",
        ],
    )
    plan = comparison.plan
    for model in plan.models:
        for peer in plan.peers:
            starts = [start for start in comparison.starts if start["peer"] == peer.name and start["model"] == model]
            if not starts:
                continue
            pools = [start["kv_bytes"] for start in starts if start["kv_bytes"] is not None]
            worked = [
                run["pss_bytes"]
                for workload in plan.workloads
                if workload.model == model
                for run in _runs(comparison, peer, workload)
            ]
            table.row(
                peer.name,
                peer.version,
                model,
                starts[0]["dtype"] or "-",
                number(_median(start["ready_s"] for start in starts)),
                _gib([start["pss_bytes"] for start in starts]),
                _gib(worked),
                _gib(pools),
            )
            warnings = dict.fromkeys(warning for start in starts for warning in start["warnings"])
            table.notes.extend(f"{peer.name} warned at a start: {warning}" for warning in warnings)
        table.notes.extend(_samples_notes(comparison, model))
    table.notes.append("PSS is the memory of all processes of a server. Only the written pages of its KV pool count.")


def _samples_notes(comparison: Comparison, model: str) -> list[str]:
    """Notes with each server's text for the same prompt. With the same weights, only rounding may change it."""
    said: dict[str, list[str]] = {}
    for start in comparison.starts:
        if start["model"] == model and start["peer"] not in (names := said.setdefault(start["sample"], [])):
            names.append(start["peer"])
    return [f"{model} model, greedily after {SAMPLE!r}: {text!r} ({', '.join(names)})." for text, names in said.items()]


def _runs(comparison: Comparison, peer: Peer, workload: Workload) -> list[dict[str, Any]]:
    return [run for run in comparison.runs if (run["peer"], run["workload"]) == (peer.name, workload.name)]


def _ratio(comparison: Comparison, peer: Peer, workload: Workload) -> float | None:
    """Tercet's output tokens per second, divided by the peer's: the median over the rounds that both finished."""
    own = {run["round"]: run["output_throughput"] for run in _runs(comparison, comparison.plan.peers[0], workload)}
    theirs = {run["round"]: run["output_throughput"] for run in _runs(comparison, peer, workload)}
    ratios = [own[round_] / theirs[round_] for round_ in own.keys() & theirs.keys()]
    return statistics.median(ratios) if ratios else None


def _cpu_note(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    """A note on the share of each of the server's processes in its processor time, over all rounds."""
    used: Counter[str] = Counter()
    for run in runs:
        used.update(run["server_cpu_s_by_name"])
    total = sum(used.values())
    if len(used) < 2 or not total:
        return []
    shares = ", ".join(f"{process} {percent(seconds / total)}" for process, seconds in used.most_common())
    return [f"Processor time of {name}: {shares}."]


def _failure_note(name: str, message: str, log: str) -> str:
    return f"{name} failed: {message}" + (f"\n\n```\n{log}\n```" if log else "")


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _gib(sizes: Sequence[int]) -> str:
    return f"{statistics.median(sizes) / 2**30:.2f}" if sizes else "-"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _named(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not value:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _workloads(text: str) -> list[Workload]:
    names = text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"unknown workload {name!r}; known workloads: {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in dict.fromkeys(names)]
