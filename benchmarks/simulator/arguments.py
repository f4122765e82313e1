"""The command line of the simulator: its flags, and the traffic and the engine that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...model_executor.runner.recurrent_settings import resolve_rows, resolve_saved_states
from ...srt.model_files.load_config import load_model_config
from ...srt.model_files.model_config import ModelConfig
from ...srt.model_files.recurrence_limits import check_recurrence
from ...srt.server_args import ServerArgs
from ...srt.settings.setting import flag_name
from ..argument_types import (
    above_zero,
    benchmark_parser,
    check_file,
    lengths,
    not_negative,
    not_negative_int,
    positive,
    rate,
    ratio,
    slo,
)
from ..engine_args import add_engine_arguments, engine_args
from ..metrics import SLO_NAMES
from ..offline_workloads import Span
from ..plots import check_png
from ..results import add_results_arguments
from .cost import DEFAULT_PROFILE, PROFILES, DeviceProfile, load_profile
from .peer_planners import TERCET
from .replay import Replay
from .streams import beside_streams
from .synthetic import (
    DEFAULT_INPUT_LEN,
    DEFAULT_OUTPUT_LEN,
    TrafficSettings,
    agents,
    beside_documents,
    prefix_tree,
    random_prompts,
)
from .trace_files import burstgpt, mooncake
from .traffic import SimRequest, Traffic

TRACES = {"mooncake": mooncake, "burstgpt": burstgpt}
_SYNTHETIC = ("random", "streams", "prefix-tree", "agents")
_STREAMS, _TREE, _AGENTS = ("streams",), ("prefix-tree",), ("agents",)
_TRAFFIC_FLAGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "trace_path": (tuple(TRACES), None),
    "slowdown": (tuple(TRACES), 1.0),
    "request_rate": (_SYNTHETIC, math.inf),
    "burstiness": (_SYNTHETIC, 1.0),
    "input_len": (_SYNTHETIC, DEFAULT_INPUT_LEN),
    "output_len": (_SYNTHETIC, DEFAULT_OUTPUT_LEN),
    "length_sigma": (_SYNTHETIC, 0.0),
    "abort_share": (_SYNTHETIC, 0.0),
    "abort_after": (_SYNTHETIC, 1.0),
    "tenants": (_SYNTHETIC, 1),
    "tenant_skew": (_SYNTHETIC, 0.0),
    "max_new_tokens": (_SYNTHETIC, 0),
    "streams": (_STREAMS, 8),
    "stream_len": (_STREAMS, 2_000),
    "tree_levels": (_TREE, 2),
    "tree_branching": (_TREE, 8),
    "tree_level_len": (_TREE, 512),
    "tree_skew": (_TREE, 0.0),
    "turns": (_AGENTS, Span(10, 10)),
    "tool_len": (_AGENTS, Span(100, 500)),
    "tool_time": (_AGENTS, 5.0),
    "documents": (_AGENTS, 0),
    "document_len": (_AGENTS, Span(2000, 6000)),
    "document_rate": (_AGENTS, 1.0),
}
"""Each flag's kinds of traffic and default. With another kind, the flag has no effect and is refused."""
_NOT_SIMULATED = (
    "enable_hierarchical_cache",
    "hicache_size",
    "hicache_storage_dir",
    "hicache_storage_size",
    "kv_events_config",
    "record_schedule",
    "explain_schedule",
)
"""Settings of the engine that a simulation would ignore: it has no lower tiers, and writes and publishes nothing."""
_DEFAULT_POOL_TOKENS = 65_536
_DEFAULT_REQUESTS = 1_000
_MAX_CONCURRENCY = 1_000_000
"""The simulation has a number for each place."""
_DEFAULT_ROUND_TRIP_MS = 2.0


def parse(argv: Sequence[str] | None, description: str | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The complete and checked options. Exits with a message for invalid ones."""
    parser = benchmark_parser("scheduler", description)
    _add_traffic_flags(parser.add_argument_group("traffic"))
    _add_run_flags(parser.add_argument_group("simulation"))
    add_results_arguments(parser)
    add_engine_arguments(parser)
    options = parser.parse_args(argv)
    try:
        _complete(options)
    except ValueError as error:
        parser.error(str(error))
    return parser, options


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, text: str, **more: Any) -> None:
        kinds, default = _TRAFFIC_FLAGS[flag[2:].replace("-", "_")]
        shown = f"{default[0]}-{default[1]}" if isinstance(default, Span) and default[0] < default[1] else default
        shown = shown[0] if isinstance(shown, Span) else shown
        only = "" if kinds == _SYNTHETIC else f"{', '.join(kinds)}: "
        after = "" if default is None else f" (default: {shown})"
        group.add_argument(flag, help=only + text + after, **more)

    group.add_argument(
        "--traffic",
        choices=(*_SYNTHETIC, *TRACES),
        help="random (default): prompts that share nothing; streams: the same beside long answers; prefix-tree: "
        "prompts that begin with a path of a tree; agents: sessions of turns with tool calls; mooncake, burstgpt: a "
        "file in the format of these traces",
    )
    group.add_argument(
        "--replay",
        metavar="FILE",
        type=Path,
        help="traffic and settings of a recording (tercet serve --record-schedule FILE)",
    )
    group.add_argument(
        "--num-requests",
        type=positive,
        help=f"requests, or sessions of agents (default: {_DEFAULT_REQUESTS}; all of a trace)",
    )
    group.add_argument("--max-concurrency", metavar="N", type=positive, help="hold requests back while N are under way")
    group.add_argument(
        "--round-trip",
        metavar="MS",
        type=not_negative,
        help="milliseconds from the end of a request until the one that was held back for it arrives (default: "
        f"{_DEFAULT_ROUND_TRIP_MS:g})",
    )
    group.add_argument("--seed", type=not_negative_int, default=0, help="seed of the traffic (default: 0)")
    add("--trace-path", "file of the trace", metavar="FILE", type=Path)
    add("--slowdown", "factor of the times of the trace", type=above_zero)
    add("--request-rate", "mean arrivals per second; inf: all at once", type=rate)
    add("--burstiness", "shape of the gamma distribution of gaps; below 1: bursts", type=above_zero)
    add("--input-len", "own tokens of a prompt, N or A-B", type=lengths)
    add("--output-len", "tokens of an answer, N or A-B", type=lengths)
    add("--length-sigma", "0: uniform lengths; otherwise log-normal ones with this sigma", type=not_negative)
    add("--max-new-tokens", "limit that clients send; 0: the length of the answer", type=not_negative_int)
    add("--abort-share", "share of requests whose clients leave", type=ratio)
    add("--abort-after", "mean seconds until such a client leaves", type=above_zero)
    add("--tenants", "number of tenants", type=positive)
    add("--tenant-skew", "tenant k sends in proportion to k ** -SKEW", type=not_negative)
    add("--streams", "answers that begin before the first prompt arrives", type=positive)
    add("--stream-len", "tokens of such an answer", type=positive)
    add("--tree-levels", "levels of the tree", type=positive)
    add("--tree-branching", "children of each node", type=positive)
    add("--tree-level-len", "tokens of each node", type=positive)
    add("--tree-skew", "child k is chosen in proportion to k ** -SKEW", type=not_negative)
    add("--turns", "turns of a session, N or A-B", type=lengths)
    add("--tool-len", "tokens of a tool's result, N or A-B", type=lengths)
    add("--tool-time", "mean seconds of a tool call", type=above_zero)
    add("--documents", "documents that are sent once beside the sessions, by one more tenant", type=not_negative_int)
    add("--document-len", "tokens of a document, N or A-B", type=lengths)
    add("--document-rate", "mean documents per second", type=above_zero)


def _add_run_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--policies", metavar="A,B", help="policies to compare, each on the same traffic (default: --schedule-policy)"
    )
    group.add_argument(
        "--eviction-policies",
        metavar="A,B",
        help="eviction policies to compare, with each of --policies (default: --radix-eviction-policy)",
    )
    group.add_argument(
        "--planners",
        metavar="A,B",
        default=TERCET,
        help="rules for the tokens of a step to compare: tercet (default); sglang-rule: prompts before decodes; "
        "vllm-rule: decodes before prompts, --max-prefill-tokens in all",
    )
    group.add_argument(
        "--cost",
        metavar="NAME|FILE",
        help=f"how long steps take: a JSON file, or one of {', '.join(PROFILES)} (default: {DEFAULT_PROFILE}; with "
        "--replay: a fit to the recorded steps)",
    )
    group.add_argument("--save-cost", metavar="FILE", type=Path, help="write the costs that were used, for --cost")
    group.add_argument(
        "--goodput", metavar="NAME:MS", nargs="+", type=slo, help=f"latency objectives: {', '.join(SLO_NAMES)}"
    )
    group.add_argument(
        "--optimum-requests",
        metavar="N",
        type=not_negative_int,
        default=2_000,
        help="compare the hit rate of the first N requests with the best possible one (default: 2000)",
    )
    group.add_argument(
        "--plot", metavar="PNG", nargs="?", const="", help="plot latencies in the terminal, and all figures in a file"
    )


def _complete(options: argparse.Namespace) -> None:
    """Fills in defaults and checks the flags of the traffic. Raises ValueError."""
    _refuse_not_simulated(vars(options))
    if "dlpm" in (options.policies or "").split(",") and not hasattr(options, "schedule_policy"):
        options.schedule_policy = "dlpm"  # the one with settings of its own; each run has its policy
    if options.replay is not None:
        given = options.traffic or options.num_requests or options.max_concurrency or options.config
        if given or hasattr(options, "model_path"):
            raise ValueError(
                "--traffic, --num-requests, --max-concurrency, --config and --model-path have no effect with --replay"
            )
        options.traffic = "replay"
    if options.max_concurrency is None and options.round_trip is not None:
        raise ValueError("--round-trip has no effect without --max-concurrency")
    if options.max_concurrency is not None and options.max_concurrency > _MAX_CONCURRENCY:
        raise ValueError(f"--max-concurrency must be at most {_MAX_CONCURRENCY}, got {options.max_concurrency}")
    if options.max_concurrency is not None and options.round_trip is None:
        options.round_trip = _DEFAULT_ROUND_TRIP_MS
    options.traffic = options.traffic or "random"
    for name, (kinds, default) in _TRAFFIC_FLAGS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.traffic not in kinds:
            raise ValueError(f"--{name.replace('_', '-')} has no effect with --traffic {options.traffic}")
    if options.traffic in TRACES and options.trace_path is None:
        raise ValueError(f"--traffic {options.traffic} needs --trace-path")
    if options.num_requests is None and options.traffic in _SYNTHETIC:
        options.num_requests = _DEFAULT_REQUESTS
    slos = options.goodput or []
    options.goodput = dict(slos)
    if len(options.goodput) < len(slos):
        raise ValueError("--goodput names an objective twice")
    check_file("--save-cost", options.save_cost)
    check_file("--plot", options.plot)
    if options.plot:
        check_png(options.plot)
    if options.replay is None or options.cost is not None:
        options.profile = load_profile(options.cost or DEFAULT_PROFILE)


def _refuse_not_simulated(given: Collection[str]) -> None:
    """Raises ValueError if one of these settings would be ignored."""
    for name in _NOT_SIMULATED:
        if name in given:
            raise ValueError(
                f"{flag_name(name)} has no effect: the simulator has no tiers, and records and publishes nothing"
            )


def check_drafts(server_args: ServerArgs, profile: DeviceProfile, *, is_replay: bool) -> None:
    """Raises ValueError if the settings have drafts, and a simulation would not show what they bring."""
    name = flag_name("speculative_algorithm")
    if server_args.speculative_algorithm is not None:
        if not is_replay:
            raise ValueError(f"{name} has no effect without --replay: other simulated outputs repeat nothing")
        if profile.is_asynchronous:
            raise ValueError(f"{name} needs the cost model of a CPU, got {profile.name}")


def check_prompts_fit(options: argparse.Namespace, server_args: ServerArgs) -> None:
    """Raises ValueError for prompts that the context can never hold. Each of them would be made, only to be refused."""
    most = server_args.context_length
    assert most is not None
    lens = {
        "input_len": options.input_len.high,
        "tool_len": options.tool_len.high,
        "document_len": options.document_len.high if options.documents else 0,
        "tree_level_len": options.tree_levels * options.tree_level_len,
    }
    for name, longest in lens.items():
        if options.traffic in _TRAFFIC_FLAGS[name][0] and longest >= most:
            raise ValueError(
                f"{flag_name(name)} must give prompts below the context of {most} tokens, got {longest} tokens"
            )


def traffic_of(options: argparse.Namespace, vocab_size: int) -> Traffic:
    """The traffic from its beginning. The same options give the same traffic."""
    return Traffic(
        _requests(options, vocab_size), options.max_concurrency, round_trip_s=(options.round_trip or 0.0) / 1000
    )


def _requests(options: argparse.Namespace, vocab_size: int) -> Iterator[SimRequest]:
    if options.traffic in TRACES:
        return _from_trace(options, vocab_size)
    settings = TrafficSettings(
        num_requests=options.num_requests,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        input_len=options.input_len,
        output_len=options.output_len,
        length_sigma=options.length_sigma,
        max_new_tokens=options.max_new_tokens,
        abort_share=options.abort_share,
        abort_after_s=options.abort_after,
        num_tenants=options.tenants,
        tenant_skew=options.tenant_skew,
        vocab_size=vocab_size,
        seed=options.seed,
    )
    if options.traffic == "prefix-tree":
        return prefix_tree(
            settings, options.tree_levels, options.tree_branching, options.tree_level_len, options.tree_skew
        )
    if options.traffic == "streams":
        return beside_streams(settings, options.streams, options.stream_len)
    if options.traffic == "agents":
        sessions = agents(settings, options.turns, options.tool_len, options.tool_time)
        return beside_documents(sessions, settings, options.documents, options.document_len, options.document_rate)
    return random_prompts(settings)


def replayed_args(options: argparse.Namespace, replay: Replay) -> ServerArgs:
    """The recorded settings, and those of the command line in place of them. Raises ValueError."""
    recorded = replay.server_args()
    given = {name: value for name, value in vars(options).items() if hasattr(recorded, name)}
    return dataclasses.replace(recorded, **given)


def _from_trace(options: argparse.Namespace, vocab_size: int) -> Iterator[SimRequest]:
    request = None
    for request in TRACES[options.traffic](options.trace_path, vocab_size, options.seed, options.num_requests):
        request.arrival_s *= options.slowdown
        yield request
    if request is None:
        raise ValueError(f"{options.trace_path} has no request")


def engine_of(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    profile: DeviceProfile,
    *,
    needs_only_shape: bool = True,
) -> tuple[ServerArgs, ModelConfig]:
    """The settings of the simulated engine, complete, and the model's configuration.

    `needs_only_shape`: as in `engine_args`.

    Settings that a server takes from its device have the defaults of a GPU or of a CPU, as the profile says. Exits
    through `parser.error` for invalid ones.
    """
    server_args = engine_args(parser, options, needs_only_shape=needs_only_shape)
    try:
        _refuse_not_simulated(
            [one.name for one in dataclasses.fields(server_args) if getattr(server_args, one.name) != one.default]
        )
        config = load_model_config(server_args.model_path, server_args.load_format)
        return complete(server_args, config, profile), config
    except (OSError, ValueError) as error:
        parser.error(str(error))


def complete(server_args: ServerArgs, config: ModelConfig, profile: DeviceProfile) -> ServerArgs:
    """Settings in which no limit is missing. Raises ValueError for settings that the model does not have."""
    check_recurrence(server_args, config)
    on_gpu = profile.is_asynchronous
    device = torch.device("cuda" if on_gpu else "cpu")
    return dataclasses.replace(
        server_args,
        max_running_requests=resolve_rows(server_args, config, torch.bfloat16, device),
        max_saved_states=resolve_saved_states(server_args, config, torch.bfloat16, device),
        page_size=server_args.page_size or (64 if on_gpu else 32),
        context_length=server_args.context_length or config.context_len,
        max_prefill_tokens=server_args.max_prefill_tokens or (16384 if on_gpu else 2048),
        chunked_prefill_size=server_args.chunked_prefill_size or (8192 if on_gpu else 1024),
        max_total_tokens=server_args.max_total_tokens or _DEFAULT_POOL_TOKENS,
        random_seed=server_args.random_seed or 0,
    )
