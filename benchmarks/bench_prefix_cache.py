"""Measure the gain of the prefix cache: groups of prompts with a shared prefix, with and without the cache.

    tercet bench prefix --model-path qwen3-0.6b --num-groups 32 --prompts-per-group 8

Two engines take turns in the same run. Each round starts with an empty cache. All requests are sent at once, shuffled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence

from ..model_executor.attention.registry import PAGE_OF_KV_TILES, PAGE_OF_PANELS
from ..model_executor.runner.settings import resolve_device
from ..srt.entrypoints.engine import Engine
from ..srt.model_files.load_config import load_model_config
from ..srt.model_files.model_name import model_name
from ..srt.server_args import ServerArgs
from .argument_types import benchmark_parser, positive
from .engine_args import add_engine_arguments, engine_args
from .offline_workloads import shared_prefix_requests
from .results import Result, add_results_arguments, finish, number, percent
from .rounds import Round, Side, TercetSide, median_seconds, run_alternating, warmups
from .workloads import Request

_ON, _OFF = "with the cache", "without"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    server_args = engine_args(parser, args)
    if server_args.disable_radix_cache:
        parser.error("--disable-radix-cache is not allowed: this benchmark compares engines with and without it")
    try:
        config = load_model_config(server_args.model_path, server_args.load_format)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    name = model_name(server_args.model_path)
    requests = shared_prefix_requests(
        args.num_groups,
        args.prompts_per_group,
        args.shared_len,
        args.own_len,
        args.output_len,
        args.seed,
        config.vocab_size,
    )
    if server_args.max_total_tokens is None:
        # Both engines run at the same time, so neither may take all memory. This pool size fits all requests.
        on_gpu = resolve_device(server_args.device).type == "cuda"
        page = server_args.page_size or (PAGE_OF_KV_TILES if on_gpu else PAGE_OF_PANELS)
        needed = sum(-(-(request.prompt_len + request.output_len) // page) * page for request in requests)
        server_args = dataclasses.replace(server_args, max_total_tokens=needed + page)
    try:
        result = Result(
            f"prefix-cache-{name}", f"Prefix cache: {name}", parser.prog, argv, resolve_device(server_args.device)
        )
        rounds = _run(server_args, requests, args.rounds)
    except ValueError as error:
        parser.error(str(error))
    _report(result, args, name, requests, rounds)
    finish(result, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = benchmark_parser("prefix", __doc__)
    parser.add_argument(
        "--num-groups", type=positive, default=32, help="number of groups of prompts with the same prefix (default: 32)"
    )
    parser.add_argument("--prompts-per-group", type=positive, default=8, help="prompts in each group (default: 8)")
    parser.add_argument(
        "--shared-len", type=positive, default=896, help="tokens of the prefix that a group shares (default: 896)"
    )
    parser.add_argument(
        "--own-len", type=positive, default=128, help="tokens of each prompt after the shared prefix (default: 128)"
    )
    parser.add_argument("--output-len", type=positive, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="number of rounds; the median is reported (default: 3)"
    )
    add_results_arguments(parser)
    add_engine_arguments(parser)
    return parser


def _run(server_args: ServerArgs, requests: Sequence[Request], num_rounds: int) -> dict[str, list[Round]]:
    server_args = server_args.with_seed()  # random weights must be the same in both engines
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, disabled in ((_ON, False), (_OFF, True)):
            settings = dataclasses.replace(server_args, disable_radix_cache=disabled)
            sides[name] = TercetSide(stack.enter_context(Engine(server_args=settings)))
            sides[name].run(warmups(requests))
        return run_alternating(sides, requests, num_rounds)


def _report(
    result: Result, args: argparse.Namespace, name: str, requests: Sequence[Request], rounds: dict[str, list[Round]]
) -> None:
    num_in, num_out = sum(request.prompt_len for request in requests), sum(request.output_len for request in requests)
    best = (args.prompts_per_group - 1) * args.shared_len / (args.prompts_per_group * (args.shared_len + args.own_len))
    title = (
        f"{name}: {args.num_groups} groups of {args.prompts_per_group}, {args.shared_len} shared + {args.own_len} own "
        f"tokens in, {args.output_len} out"
    )
    table = result.table(title, ["engine", "s", "output tok/s", "prompt tok/s", "hit rate", "speed-up"])
    without = median_seconds(rounds[_OFF])
    hit_rates = {}
    for side, done in rounds.items():
        seconds = median_seconds(done)
        hit_rates[side] = sum(round_.cached_tokens for round_ in done) / (num_in * len(done))
        table.row(
            side,
            number(seconds),
            number(num_out / seconds),
            number(num_in / seconds),
            percent(hit_rates[side]),
            number(without / seconds),
        )
    same = sum(a == b for a, b in zip(rounds[_ON][0].output_ids, rounds[_OFF][0].output_ids, strict=True))
    table.notes.append(
        f"At best {percent(best)} of the prompt tokens can be found in the cache. "
        f"{same} of {len(requests)} answers are the same with the cache and without. {args.rounds} rounds, medians."
    )
    result.values.update(
        model=name,
        num_prompts=len(requests),
        input_tokens=num_in,
        output_tokens=num_out,
        hit_rate=hit_rates[_ON],
        best_hit_rate=best,
        speed_up=without / median_seconds(rounds[_ON]),
        same_answers=same,
        seconds={side: [round_.seconds for round_ in done] for side, done in rounds.items()},
    )


if __name__ == "__main__":
    sys.exit(main())
