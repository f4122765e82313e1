"""Measure speculative decoding on a CPU: tokens per second with and without drafts.

    tercet bench speculation [--batch-size 1,4,8] [--temperature 0,0.7] [flags of the engine]

Two engines run the same requests in alternation, one of them with drafts. Their tokens must be equal. There are three
kinds of requests. The prompt of `copy` is a passage of the text, and then its first tokens again, so models go on with
the passage. That of `free` is the passage alone, so models write a text of their own. The requests of `edit` are those
of `free` with a prediction: the answer itself, with every 16th token changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import msgspec
import torch

from ..managers.local_engine import LocalEngine
from ..srt.io_struct import AbortFinish
from ..srt.model_files.model_name import model_name
from ..srt.sampling_params import SamplingParams
from ..srt.server_args import ServerArgs
from ..srt.speculation_state import SpeculationState
from ..srt.text.tokenizer import load_tokenizer
from .argument_types import benchmark_parser, not_negative, numbers, positive
from .engine_args import add_engine_arguments, engine_args
from .results import Result, add_results_arguments, finish, number, percent
from .text_files import read_text
from .workloads import BUNDLED_TEXT

KINDS = ("copy", "free", "edit")
_BEGINNING = 16
"""Tokens of the passage that a prompt of `copy` repeats."""
_CHANGE_INTERVAL = 16
"""The prediction of `edit` differs from the answer in one of so many tokens."""


class Case(NamedTuple):
    kind: str
    temperature: float
    batch_size: int


class Measured(NamedTuple):
    """One case: the rates of all rounds, and the work of the drafts in all rounds."""

    plain: list[float]
    """output tokens per second without drafts"""
    drafted: list[float]
    """the same with drafts"""
    drafts: SpeculationState


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 if drafts have changed a token."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "speculative_algorithm"):
        args.speculative_algorithm = "NGRAM"
    if not args.batch_size:
        parser.error("--batch-size must name a number")
    server_args = engine_args(parser, args)
    try:
        passages = read_passages(server_args.model_path, args, args.rounds * max(args.batch_size))
        drafting = LocalEngine(server_args=server_args)
        num_drafts = server_args.speculative_num_draft_tokens
        default = ServerArgs.speculative_num_draft_tokens
        plain = LocalEngine(
            server_args=dataclasses.replace(
                server_args, speculative_algorithm=None, speculative_num_draft_tokens=default
            )
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    name = model_name(server_args.model_path)
    result = Result(f"speculation-{name}", f"Speculative decoding: {name}", parser.prog, argv, torch.device("cpu"))
    cases = [Case(*values) for values in product(KINDS, args.temperature, args.batch_size)]
    measured, different = {}, []
    try:
        for case in cases:
            measured[case], is_equal = measure(case, plain, drafting, passages, args)
            if not is_equal:
                different.append(case)
    except ValueError as error:
        parser.error(str(error))
    report(result, measured, args, num_drafts)
    finish(result, args)
    for case in different:
        sys.stderr.write(f"drafts have changed tokens of {case}\n")
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("speculation", __doc__)
    parser.add_argument(
        "--batch-size", type=numbers, default=[1, 4, 8], metavar="N,...", help="requests at once (default: 1,4,8)"
    )
    parser.add_argument(
        "--temperature", type=_temperatures, default=[0.0, 0.7], metavar="T,...", help="of requests (default: 0,0.7)"
    )
    parser.add_argument("--prompt-len", type=positive, default=256, help="tokens of a passage (default: 256)")
    parser.add_argument("--output-len", type=positive, default=128, help="output tokens of a request (default: 128)")
    parser.add_argument(
        "--rounds", type=positive, default=5, help="rounds of each case, with passages of their own (default: 5)"
    )
    add_results_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _temperatures(text: str) -> list[float]:
    """ "0,0.7" -> [0.0, 0.7]"""
    return [not_negative(word) for word in text.split(",")]


def read_passages(model_path: str, args: argparse.Namespace, count: int) -> list[list[int]]:
    """Passages of the bundled text, as token ids. Raises ValueError and OSError."""
    ids = load_tokenizer(model_path).encode(read_text(BUNDLED_TEXT))
    if len(ids) < count * args.prompt_len:
        raise ValueError(
            f"--rounds times --batch-size times --prompt-len must be at most {len(ids)}, the length of the text, "
            f"got {count * args.prompt_len}"
        )
    return [list(ids[start : start + args.prompt_len]) for start in range(0, count * args.prompt_len, args.prompt_len)]


def measure(
    case: Case, plain: LocalEngine, drafting: LocalEngine, passages: list[list[int]], args: argparse.Namespace
) -> tuple[Measured, bool]:
    """Measure one case. Returns also whether both engines have the same tokens."""
    prompts = [ids + ids[:_BEGINNING] for ids in passages] if case.kind == "copy" else passages
    sampling = SamplingParams(
        temperature=case.temperature, max_new_tokens=args.output_len, ignore_eos=True, sampling_seed=1
    )
    rates: dict[LocalEngine, list[float]] = {plain: [], drafting: []}
    is_equal = True
    before = drafts_of(drafting)
    for round_ in range(args.rounds):
        batch = prompts[round_ * case.batch_size : (round_ + 1) * case.batch_size]
        predictions = None
        if case.kind == "edit":
            _, answers = run(plain, batch, sampling)
            predictions = [changed(ids) for ids in answers]
        tokens = {}
        for engine in (plain, drafting) if round_ % 2 == 0 else (drafting, plain):
            rate, tokens[engine] = run(engine, batch, sampling, predictions if engine is drafting else None)
            rates[engine].append(rate)
        is_equal &= tokens[plain] == tokens[drafting]
    return Measured(rates[plain], rates[drafting], drafts_of(drafting).since(before)), is_equal


def changed(ids: list[int]) -> list[int]:
    """The same tokens, but another one at each place of a change."""
    last = _CHANGE_INTERVAL - 1
    return [abs(token - 1) if place % _CHANGE_INTERVAL == last else token for place, token in enumerate(ids)]


def drafts_of(engine: LocalEngine) -> SpeculationState:
    drafts = engine.scheduler.state().speculation
    assert drafts is not None
    return drafts


def run(
    engine: LocalEngine, prompts: list[list[int]], sampling: SamplingParams, predictions: list[list[int]] | None = None
) -> tuple[float, list[list[int]]]:
    """The tokens per second once each request has its first token, and the tokens of each request.

    Raises ValueError if a request fails.
    """
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for rid, ids, prediction in zip(tokens, prompts, predictions or [[]] * len(prompts), strict=True):
        engine.add_request(rid, ids, sampling, prediction=prediction)
    num_left = len(prompts)
    while not all(tokens.values()):
        num_left -= _step(engine, tokens)
    num_before, start = sum(map(len, tokens.values())), time.perf_counter()
    while num_left:
        num_left -= _step(engine, tokens)
    num_new = sum(map(len, tokens.values())) - num_before
    return num_new / (time.perf_counter() - start), list(tokens.values())


def _step(engine: LocalEngine, tokens: dict[str, list[int]]) -> int:
    """Runs a step. Returns the number of requests that have ended."""
    result = engine.step()
    for rid, ids in result.new_tokens.items():
        tokens[rid] += ids
    for reason in result.finish_reasons.values():
        if isinstance(reason, AbortFinish):
            raise ValueError(f"a request failed: {reason.message}")
    return len(result.finished)


def report(result: Result, measured: dict[Case, Measured], args: argparse.Namespace, num_drafts: int) -> None:
    table = result.table(
        "Output tokens per second",
        ["requests", "temperature", "batch", "without", "with drafts", "ratio", "tokens of a verification", "accepted"],
    )
    table.notes.append(
        f"{args.rounds} rounds in alternation; prompts of {args.prompt_len} tokens, {args.output_len} output tokens; "
        f"at most {num_drafts} drafts of a request"
    )
    rows = []
    for case, found in measured.items():
        plain, drafted = statistics.harmonic_mean(found.plain), statistics.harmonic_mean(found.drafted)
        ratio = drafted / plain
        table.row(
            case.kind,
            f"{case.temperature:g}",
            str(case.batch_size),
            number(plain),
            number(drafted),
            f"{ratio:.2f}",
            f"{found.drafts.accept_length:.2f}",
            percent(found.drafts.accept_rate),
        )
        drafts = msgspec.structs.asdict(found.drafts)
        rows.append({**case._asdict(), "plain": found.plain, "drafted": found.drafted, "ratio": ratio, **drafts})
    result.values.update(cases=rows)


if __name__ == "__main__":
    sys.exit(main())
