"""Measure what grammars cost: constrained requests, and unconstrained requests of equal length, in turns.

    tercet bench grammars
    tercet bench grammars --num-prompts 500 --num-streams 16 --model-path qwen3-0.6b

The requests are those of grammar_workload.py: random JSON schemas, regular expressions and a grammar. Their prompts are
short, so that decode steps take most of the time. jsonschema and `re` check every constrained output.

The requests run in groups. Each group runs four times: with grammars, twice without, and with grammars. So a drift of
the machine's speed changes both sides alike. The grammars are new to the engine in the first run, and it has compiled
them before the last. The runs without grammars have the prompts, the sampling parameters and the numbers of tokens of
the first run. Each run begins with an empty prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..managers.grammar_loader import MAX_CACHED
from ..model_executor.runner.settings import resolve_device
from ..srt.entrypoints.engine import Engine
from ..srt.model_files.model_name import model_name
from ..srt.server_args import ServerArgs
from .argument_types import benchmark_parser, not_negative_int, positive
from .engine_args import add_engine_arguments, engine_args
from .grammar_workload import Case, random_case
from .linux_processes import family
from .results import Result, add_results_arguments, finish, number, percent

NEW, KNOWN, NONE = "new grammars", "known grammars", "no grammars"
_TURNS = (NEW, NONE, NONE, KNOWN)
_TEMPERATURES = (0.0, 0.8, 1.5)
_MAX_NEW_TOKENS = 700
_MAX_GROUP = MAX_CACHED
"""The engine keeps so many compiled grammars."""
_SHOWN_WRONG = 3


@dataclass
class Cost:
    """What the runs of one side took, together."""

    num_tokens: int = 0
    seconds: float = 0.0
    scheduler_s: float = 0.0
    """Processor seconds of the scheduler, with the threads that compute the model."""
    all_s: float = 0.0
    """Processor seconds of all processes."""

    def add(self, other: Cost) -> None:
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds
        self.scheduler_s += other.scheduler_s
        self.all_s += other.all_s


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    is_complete: bool
    """It was not cut by its maximum length."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 if an output does not match its grammar."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not 0 < args.group_size <= _MAX_GROUP:
        parser.error(f"--group-size must be between 1 and {_MAX_GROUP}, got {args.group_size}")
    if args.num_compared is not None and args.num_compared > args.num_prompts:
        parser.error(f"--num-compared must be at most --num-prompts {args.num_prompts}, got {args.num_compared}")
    if importlib.util.find_spec("jsonschema") is None:
        parser.error("the package jsonschema is not installed: pip install 'tercet[test]'")
    server_args = _engine_args(parser, args)
    name = model_name(server_args.model_path)
    title = f"{args.num_prompts} constrained requests, {args.num_streams} at once: {name}"
    try:
        result = Result(f"grammars-{name}", title, parser.prog, argv, resolve_device(server_args.device))
        with Engine(server_args=server_args) as engine:
            findings = _measure(engine, args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    _report(result, args, findings)
    finish(result, args)
    return 1 if findings.wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("grammars", __doc__)
    parser.add_argument("--num-prompts", type=positive, default=96, help="constrained requests (default: 96)")
    parser.add_argument("--num-streams", type=positive, default=16, help="requests that run at once (default: 16)")
    parser.add_argument(
        "--num-compared",
        type=not_negative_int,
        help="requests that also run without grammars; the others are only checked (default: all)",
    )
    parser.add_argument("--group-size", type=positive, default=48, help="requests of a group, at most 64 (default: 48)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first request (default: 0)")
    add_results_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _engine_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> ServerArgs:
    """The settings of the engine. Grammars need a tokenizer."""
    defaults: dict[str, Any] = {"skip_tokenizer_init": False, "max_running_requests": args.num_streams}
    for name, value in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return engine_args(parser, args)


@dataclass
class Findings:
    """What the benchmark has found."""

    costs: dict[str, Cost] = field(default_factory=lambda: {side: Cost() for side in (NEW, KNOWN, NONE)})
    num_checked: int = 0
    wrong: list[str] = field(default_factory=list)
    """A description of each output that does not match its grammar, or that was cut."""

    def check(self, cases: Sequence[Case], answers: Sequence[Answer]) -> None:
        self.num_checked += len(cases)
        for case, answer in zip(cases, answers, strict=True):
            if not (answer.is_complete and case.is_right(answer.text)):
                self.wrong.append(f"{case.sampling}: {answer.text!r}")


def _measure(engine: Engine, args: argparse.Namespace) -> Findings:
    num_streams = args.num_streams
    warmup = [_constrained(random_case(seed), seed) for seed in range(-num_streams, 0)]
    asyncio.run(_run(engine, warmup, num_streams))
    findings = Findings()
    num_compared = args.num_prompts if args.num_compared is None else args.num_compared
    for first in range(0, num_compared, args.group_size):
        numbers = range(first, min(first + args.group_size, num_compared))
        asyncio.run(_compare(engine, [args.seed + number for number in numbers], num_streams, findings))
    for first in range(num_compared, args.num_prompts, args.group_size):
        seeds = [args.seed + number for number in range(first, min(first + args.group_size, args.num_prompts))]
        cases = [random_case(seed) for seed in seeds]
        bodies = [_constrained(case, seed) for case, seed in zip(cases, seeds, strict=True)]
        findings.check(cases, asyncio.run(_run(engine, bodies, num_streams))[0])
    return findings


async def _compare(engine: Engine, seeds: Sequence[int], num_streams: int, findings: Findings) -> None:
    """Run a group in turns, with and without grammars. Raises ValueError if the lengths differ."""
    cases = [random_case(seed) for seed in seeds]
    constrained = [_constrained(case, seed) for case, seed in zip(cases, seeds, strict=True)]
    free: list[dict[str, Any]] = []
    lengths: list[int] = []
    for side in _TURNS:
        answers, cost = await _run(engine, free if side == NONE else constrained, num_streams)
        findings.costs[side].add(cost)
        if side == NEW:
            lengths = [answer.num_tokens for answer in answers]
            free = [_free(body, length) for body, length in zip(constrained, lengths, strict=True)]
        if side != NONE:
            findings.check(cases, answers)
        if lengths != [answer.num_tokens for answer in answers]:
            raise ValueError("the outputs of a run do not have the lengths of the first run")


def _constrained(case: Case, seed: int) -> dict[str, Any]:
    """The arguments of `Engine.generate` for a request with a grammar."""
    sampling = {
        "max_new_tokens": _MAX_NEW_TOKENS,
        "temperature": _TEMPERATURES[seed % len(_TEMPERATURES)],
        "sampling_seed": seed,
        **case.sampling,
    }
    return {"prompt": case.prompt, "sampling_params": sampling}


def _free(body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The same request without its grammar, and with exactly `num_tokens` tokens."""
    kept = {name: value for name, value in body["sampling_params"].items() if name in ("temperature", "sampling_seed")}
    return {**body, "sampling_params": {**kept, "max_new_tokens": num_tokens, "ignore_eos": True}}


async def _run(engine: Engine, bodies: Sequence[dict[str, Any]], num_streams: int) -> tuple[list[Answer], Cost]:
    """Run requests, `num_streams` at a time. Each stream sends its next request when its last one has ended."""
    engine.flush_cache(timeout_s=60)
    answers: dict[int, Answer] = {}
    left = iter(enumerate(bodies))

    async def stream() -> None:
        for place, body in left:
            found = await engine.async_generate(**body)
            meta = found["meta_info"]
            is_complete = meta["finish_reason"]["type"] == "stop"
            answers[place] = Answer(found["text"], meta["completion_tokens"], is_complete)

    cpu_before, began_s = _cpu_s(), time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    seconds = time.perf_counter() - began_s
    spent = {name: used - cpu_before.get(name, 0.0) for name, used in _cpu_s().items()}
    num_tokens = sum(answer.num_tokens for answer in answers.values())
    cost = Cost(num_tokens, seconds, spent["scheduler"], sum(spent.values()))
    return [answers[place] for place in range(len(bodies))], cost


def _cpu_s() -> dict[str, float]:
    """Processor seconds of this process and the engine's processes, by role."""
    used: dict[str, float] = defaultdict(float)
    for process in family(os.getpid(), ()).values():
        used[process.name] += process.cpu_s
    return used


def _report(result: Result, args: argparse.Namespace, findings: Findings) -> None:
    free = findings.costs[NONE]
    if free.num_tokens:
        header = [
            "requests with",
            "tokens",
            "output tok/s",
            "x none",
            "scheduler CPU us/token",
            "x none",
            "all us/token",
        ]
        table = result.table(result.title, header)
        for side, cost in findings.costs.items():
            table.row(
                side,
                number(cost.num_tokens),
                number(cost.num_tokens / cost.seconds),
                number((cost.num_tokens / cost.seconds) / (free.num_tokens / free.seconds)),
                number(1e6 * cost.scheduler_s / cost.num_tokens),
                number((cost.scheduler_s / cost.num_tokens) / (free.scheduler_s / free.num_tokens)),
                number(1e6 * cost.all_s / cost.num_tokens),
            )
        table.notes.append(
            "Tokens are those of the outputs. CPU time includes prefills and the compilation of grammars."
        )
    num_right = findings.num_checked - len(findings.wrong)
    table = result.table("Outputs with grammars", ["checked", "right", "share"])
    table.row(str(findings.num_checked), str(num_right), percent(num_right / findings.num_checked))
    table.notes += [f"wrong: {text}" for text in findings.wrong[:_SHOWN_WRONG]]
    result.values.update(
        num_prompts=args.num_prompts,
        num_streams=args.num_streams,
        seed=args.seed,
        num_checked=findings.num_checked,
        num_wrong=len(findings.wrong),
        costs={side: asdict(cost) for side, cost in findings.costs.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
