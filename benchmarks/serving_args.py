"""The command line of the serving benchmark. Flags have the names of SGLang's benchmark, where it has them."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .argument_types import above_zero, check_file, not_negative, not_negative_int, positive, rate, ratio, slo
from .backends import BACKENDS
from .metrics import SLO_NAMES
from .plots import check_png

_SHAREGPT = ("sharegpt", "custom")
_RANDOM = ("random", "random-ids")
_GSP = ("generated-shared-prefix",)
_MOONCAKE = ("mooncake",)
DATASETS = (*_RANDOM, *_GSP, *_SHAREGPT, *_MOONCAKE)
_NEEDS_FILE = (*_SHAREGPT, *_MOONCAKE)

DATASET_FLAGS: dict[str, tuple[tuple[str, ...], Any]] = {
    "dataset_path": (("random", *_NEEDS_FILE), None),
    "random_input_len": (_RANDOM, 1024),
    "random_output_len": (_RANDOM, 1024),
    "random_range_ratio": (_RANDOM, 0.0),
    "sharegpt_output_len": (_SHAREGPT, None),
    "sharegpt_context_len": (_SHAREGPT, None),
    "gsp_num_groups": (_GSP, 64),
    "gsp_prompts_per_group": (_GSP, 16),
    "gsp_system_prompt_len": (_GSP, 2048),
    "gsp_question_len": (_GSP, 128),
    "gsp_output_len": (_GSP, 256),
    "gsp_ordered": (_GSP, False),
    "use_trace_timestamps": (_MOONCAKE, False),
    "mooncake_slowdown_factor": (_MOONCAKE, 1.0),
}
"""Each dataset flag's datasets and default. With another dataset, the flag has no effect and is refused."""
_DEFAULT_NUM_PROMPTS = 1000


def parse(program: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line into complete and checked options. Exits with a message for invalid options."""
    parser = _parser(program)
    options = parser.parse_args(argv)
    try:
        _complete(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [options]",
        description="Measure throughput, latencies and goodput of a running server.",
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_dataset_flags(parser.add_argument_group("requests"))
    _add_traffic_flags(parser.add_argument_group("traffic"))
    _add_output_flags(parser.add_argument_group("output"))
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=BACKENDS, default="tercet", help="protocol of the server (default: tercet)")
    group.add_argument("--base-url", metavar="URL", help="address of the server (default: http://HOST:PORT)")
    group.add_argument("--host", help="host of the server (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=positive, help="port of the server (default: 30000; with vllm and vllm-chat: 8000)"
    )
    group.add_argument("--model", help="model name in requests, and its tokenizer (default: the served model)")
    group.add_argument("--served-model-name", metavar="NAME", help="model name in requests, if it is not --model")
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="directory or GGUF file (default: --model, else the model that the server names)",
    )
    group.add_argument("--header", metavar="NAME=VALUE", nargs="+", type=_header, help="headers of every request")
    group.add_argument(
        "--ready-check-timeout-sec",
        metavar="S",
        type=not_negative,
        default=60.0,
        help="maximum seconds to wait for the server (default: 60; 0: do not wait)",
    )
    group.add_argument(
        "--request-timeout-sec",
        metavar="S",
        type=above_zero,
        default=6 * 3600.0,
        help="a request without a complete answer after this time fails (default: 21600)",
    )
    group.add_argument("--flush-cache", action="store_true", help="empty the prefix cache after the warm-up")


def _add_dataset_flags(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, help_text: str, **kwargs: Any) -> None:
        default = DATASET_FLAGS[flag.removeprefix("--").replace("-", "_")][1]
        shown = "" if default is None or default is False else f" (default: {default})"
        group.add_argument(flag, default=None, help=help_text + shown, **kwargs)

    group.add_argument("--dataset-name", choices=DATASETS, default="random", help="kind of requests (default: random)")
    add(
        "--dataset-path",
        "file of the dataset; with random: a text or a ShareGPT .json that replaces the bundled text",
        metavar="FILE",
        type=Path,
    )
    group.add_argument(
        "--num-prompts", type=positive, help=f"number of requests (default: {_DEFAULT_NUM_PROMPTS}; with groups: all)"
    )
    group.add_argument("--tokenize-prompt", action="store_true", help="send token ids instead of text")
    add("--random-input-len", "maximum tokens of a prompt", type=positive)
    add("--random-output-len", "maximum tokens of an answer", type=positive)
    add("--random-range-ratio", "lengths are uniform in [RATIO * LEN, LEN]; 1: equal lengths", type=ratio)
    add("--sharegpt-output-len", "tokens of every answer; default: as in the file", type=positive)
    add("--sharegpt-context-len", "leave out requests whose prompt and answer are longer together", type=positive)
    add("--gsp-num-groups", "number of groups; the prompts of a group share a prefix", type=positive)
    add("--gsp-prompts-per-group", "requests of each group", type=positive)
    add("--gsp-system-prompt-len", "tokens of the prefix that a group shares", type=positive)
    add("--gsp-question-len", "tokens of each prompt after the shared prefix", type=positive)
    add("--gsp-output-len", "tokens of an answer", type=positive)
    add("--gsp-ordered", "send one group after the other instead of shuffling", action="store_true")
    add("--use-trace-timestamps", "send requests at the times of the trace", action="store_true")
    add("--mooncake-slowdown-factor", "factor on the times of the trace; 2 sends at half its pace", type=above_zero)
    group.add_argument("--seed", type=not_negative_int, default=42, help="seed of the requests (default: 42)")


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        metavar="R",
        type=rate,
        default=math.inf,
        help="requests per second (default: inf, all at once)",
    )
    group.add_argument(
        "--burstiness", metavar="B", type=above_zero, help="shape of the gamma-distributed gaps (default: 1, Poisson)"
    )
    group.add_argument(
        "--max-concurrency",
        metavar="N",
        type=positive,
        help="maximum number of concurrent requests (default: no limit)",
    )
    group.add_argument(
        "--warmup-requests",
        metavar="N",
        type=not_negative_int,
        default=1,
        help="requests before the measurement (default: 1)",
    )
    group.add_argument("--disable-stream", action="store_true", help="request answers without streaming")
    group.add_argument("--disable-ignore-eos", action="store_true", help="let answers end at EOS tokens")
    group.add_argument("--temperature", type=not_negative, default=0.0, help="sampling temperature (default: 0)")
    group.add_argument(
        "--extra-request-body", metavar="JSON", type=_json_object, help="further fields of every request"
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput", metavar="NAME:MS", nargs="+", type=slo, help=f"latency objectives: {', '.join(SLO_NAMES)}"
    )
    group.add_argument(
        "--output-file", metavar="FILE", type=Path, help="append the result to this file as a line of JSON"
    )
    group.add_argument("--output-details", action="store_true", help="write the figures and text of every request, too")
    group.add_argument(
        "--plot",
        metavar="PNG",
        nargs="?",
        const="",
        help="plot latencies and throughput in the terminal, and in a file if one is named",
    )
    group.add_argument("--plot-throughput", action="store_true", help="plot throughput and concurrency in the terminal")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    group.add_argument("--tag", help="label of the result")


def _complete(options: argparse.Namespace) -> None:
    """Fills in defaults. Raises ValueError for options that contradict each other."""
    name = options.dataset_name
    for flag, (datasets, default) in DATASET_FLAGS.items():
        given = getattr(options, flag)
        if given is None:
            setattr(options, flag, default)
        elif name not in datasets:
            raise ValueError(
                f"--{flag.replace('_', '-')} is allowed only with datasets {', '.join(datasets)}, got {name}"
            )
    if name in _NEEDS_FILE and options.dataset_path is None:
        raise ValueError(f"--dataset-name {name} needs --dataset-path, because no dataset is downloaded")
    if options.dataset_path is not None and not os.path.exists(options.dataset_path):
        raise ValueError(f"--dataset-path: {options.dataset_path} does not exist")
    if name in _GSP:
        available = options.gsp_num_groups * options.gsp_prompts_per_group
        options.num_prompts = options.num_prompts or available
        if options.num_prompts > available:
            raise ValueError(
                f"--num-prompts must be at most {available}, the requests of all groups, got {options.num_prompts}"
            )
    options.num_prompts = options.num_prompts or _DEFAULT_NUM_PROMPTS
    if options.tokenize_prompt and options.backend.endswith("-chat"):
        raise ValueError(f"--tokenize-prompt is not allowed with --backend {options.backend}: a chat accepts text only")
    if options.burstiness is not None and options.request_rate == math.inf:
        raise ValueError("--burstiness needs --request-rate")
    if options.use_trace_timestamps and options.request_rate != math.inf:
        raise ValueError("--use-trace-timestamps and --request-rate exclude each other")
    if options.mooncake_slowdown_factor != 1.0 and not options.use_trace_timestamps:
        raise ValueError("--mooncake-slowdown-factor needs --use-trace-timestamps")
    if options.base_url is not None and (options.host is not None or options.port is not None):
        raise ValueError("--base-url and --host or --port exclude each other")
    if options.base_url is not None and options.base_url.rstrip("/").endswith("/v1"):
        raise ValueError(f"--base-url must not end in /v1, which is added to it, got {options.base_url}")
    if options.output_details and options.output_file is None:
        raise ValueError("--output-details needs --output-file")
    extra = options.extra_request_body or {}
    if "stream" in extra:
        raise ValueError("--extra-request-body must not contain stream; use --disable-stream")
    if any(part.get("n", 1) != 1 for part in (extra, extra.get("sampling_params")) if isinstance(part, dict)):
        raise ValueError("--extra-request-body: n must be 1, because one answer per request is measured")
    _check_goodput(options)
    check_file("--output-file", options.output_file)
    check_file("--plot", options.plot)
    if options.plot:
        check_png(options.plot)
    if options.base_url is None:
        port = options.port or BACKENDS[options.backend].default_port
        host = options.host or "127.0.0.1"
        options.base_url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check_goodput(options: argparse.Namespace) -> None:
    slos = options.goodput or []
    options.goodput = dict(slos)
    if len(options.goodput) < len(slos):
        raise ValueError("--goodput names an objective twice")
    if options.disable_stream and options.goodput.keys() - {"e2el"}:
        raise ValueError("--goodput: ttft and tpot need streaming, but --disable-stream is given")


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value
