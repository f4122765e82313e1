"""Measure the throughput of the whole engine, in tokens per second, for many requests at once.

    tercet bench offline --model-path qwen3-0.6b --num-prompts 256
    tercet bench offline --model-path llama-3.1-8b --num-prompts 32 \\
        --input-len 32 --output-len 8192 --compare transformers

`tercet.Engine` runs the three processes. Prompts are random token ids, and sampling is greedy. A peer gets the same
token ids in the same run, in alternating order. The first run of each engine is a warm-up and is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..model_executor.device.dtypes import dtype_name
from ..model_executor.runner.settings import resolve_settings
from ..srt.entrypoints.engine import Engine
from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.model_name import model_name
from ..srt.server_args import ServerArgs
from .argument_types import benchmark_parser, lengths, positive
from .ceilings import measure_ceilings
from .compare import NEEDS_CHECKOUT, has_peers
from .engine_args import add_engine_arguments, engine_args
from .limits import ModelCost, workload_s
from .offline_workloads import Span, random_requests
from .results import Result, add_results_arguments, finish, number, percent
from .rounds import Round, Side, TercetSide, median_seconds, run_alternating, warmups
from .workloads import Request

_FRACTION_BESIDE_PEER = 0.45
"""Fraction of a GPU's memory for Tercet when a peer's model and cache must fit, too."""

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code: 1 when the peer could not be measured."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.compare and not has_peers():
        parser.error(f"--compare: {NEEDS_CHECKOUT}")
    server_args = engine_args(parser, args)
    name = model_name(server_args.model_path)
    try:
        config = load_model_config(server_args.model_path, server_args.load_format)
        resolved = resolve_settings(server_args, config)
        device, dtype = resolved.device, resolved.dtype
        requests = random_requests(args.num_prompts, args.input_len, args.output_len, args.seed, config.vocab_size)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    title = f"{args.num_prompts} requests at once: {name}"
    result = Result(f"offline-{name}-{args.num_prompts}x{args.output_len.high}", title, parser.prog, argv, device)
    result.ceilings = measure_ceilings(device, resolved.multiplied_dtype, small=args.small_ceilings)
    limit_s = workload_s(
        ModelCost.of_runner(config, resolved),
        [request.prompt_len for request in requests],
        [request.output_len for request in requests],
        result.ceilings,
    )
    if args.compare and device.type == "cuda" and server_args.mem_fraction_static is None:
        server_args = dataclasses.replace(server_args, mem_fraction_static=_FRACTION_BESIDE_PEER)
    try:
        rounds, notes = _run(args, server_args, requests, device, dtype)
    except ValueError as error:
        parser.error(str(error))
    _report(result, name, requests, rounds, limit_s, notes)
    result.values.update(dtype=dtype_name(dtype), seed=args.seed, compared=args.compare)
    finish(result, args)
    return 1 if args.compare and args.compare not in rounds else 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("offline", __doc__)
    parser.add_argument("--num-prompts", type=positive, default=256, help="number of requests (default: 256)")
    parser.add_argument(
        "--input-len", type=lengths, default=Span(100, 1024), help="prompt tokens, N or A-B (default: 100-1024)"
    )
    parser.add_argument(
        "--output-len", type=lengths, default=Span(100, 1024), help="answer tokens, N or A-B (default: 100-1024)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parser.add_argument(
        "--rounds", type=positive, default=1, help="number of rounds; the median is reported (default: 1)"
    )
    parser.add_argument("--compare", choices=("transformers",), help="engine that is measured with the same requests")
    parser.add_argument(
        "--small-ceilings", action="store_true", help="measure ceilings with tiny sizes, to try the program"
    )
    add_results_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _run(
    args: argparse.Namespace,
    server_args: ServerArgs,
    requests: Sequence[Request],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[dict[str, list[Round]], list[str]]:
    """The rounds of each side, and notes for the report."""
    notes = []

    def note_failure(name: str, error: Exception) -> None:
        """A failing peer must not discard our own numbers."""
        notes.append(f"{name} could not be measured: {type(error).__name__}: {str(error)[:300]}")

    with contextlib.ExitStack() as stack:
        engine, seconds = _timed(lambda: stack.enter_context(Engine(server_args=server_args)))
        notes.append(f"Tercet was ready after {number(seconds)} s.")
        ours = TercetSide(engine)
        ours.run(warmups(requests))
        sides: dict[str, Side] = {"Tercet": ours}
        if args.compare == "transformers":
            # Imported here: the import takes seconds, most runs do not need it, and a wheel lacks the file.
            from .peers.transformers_peer import TransformersSide

            try:
                peer, seconds = _timed(lambda: TransformersSide(server_args.model_path, device, dtype, requests))
                stack.callback(peer.close)
                peer.run(warmups(requests))
            except Exception as error:
                note_failure("transformers", error)
            else:
                notes.append(f"transformers was ready after {number(seconds)} s, attention {peer.attention!r}.")
                sides["transformers"] = peer
        return run_alternating(sides, requests, args.rounds, note_failure), notes


def _timed(make: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return make(), time.perf_counter() - start


def _report(
    result: Result,
    name: str,
    requests: Sequence[Request],
    rounds: dict[str, list[Round]],
    limit_s: float,
    notes: Sequence[str],
) -> None:
    num_in, num_out = sum(request.prompt_len for request in requests), sum(request.output_len for request in requests)
    title = f"{name}: {len(requests)} requests, {num_in:,} tokens in, {num_out:,} out"
    table = result.table(title, ["engine", "s", "output tok/s", "all tok/s", "requests/s", "of the limit", "x Tercet"])
    ours = median_seconds(rounds["Tercet"])
    for side, done in rounds.items():
        seconds = median_seconds(done)
        table.row(
            side,
            number(seconds),
            number(num_out / seconds),
            number((num_in + num_out) / seconds),
            number(len(requests) / seconds),
            percent(limit_s / seconds),
            number(ours / seconds),
        )
    table.row(
        "limit", number(limit_s), number(num_out / limit_s), number((num_in + num_out) / limit_s), "-", "100 %", "-"
    )
    table.notes.append(f"{len(rounds['Tercet'])} rounds, medians. {' '.join(notes)}")
    retractions = sum(round_.num_retractions for round_ in rounds["Tercet"])
    if retractions:
        table.notes.append(f"Tercet retracted requests {retractions} times: its KV pool was too small.")
    result.values.update(
        model=name,
        num_prompts=len(requests),
        input_tokens=num_in,
        output_tokens=num_out,
        limit_s=limit_s,
        output_tok_s=num_out / ours,
        seconds={side: [round_.seconds for round_ in done] for side, done in rounds.items()},
        num_retractions=retractions,
    )


if __name__ == "__main__":
    sys.exit(main())
