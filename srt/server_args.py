"""Every setting of an engine: one annotated field each. The command line, its help, the docs table and the validation
come from these fields, and from nowhere else."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml

from . import env


@dataclass(frozen=True)
class Setting:
    """How a field shows itself: one line of help, and whether it belongs to the HTTP server only."""

    help: str
    server_only: bool = False


def _server(text: str) -> Setting:
    return Setting(text, server_only=True)


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """Settings of an engine. Frozen: a derived setting is a new object (`dataclasses.replace`).

    Raises ValueError, naming the flag, what was given and what is allowed.
    """

    model_path: Annotated[str, Setting("Hugging Face directory, .gguf file, or config.json (dummy weights)")]
    tokenizer_path: Annotated[str | None, Setting("Tokenizer of another directory or .gguf file")] = None
    skip_tokenizer_init: Annotated[bool, Setting("No tokenizer: token ids in, token ids out")] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], Setting("Weights' format; dummy: random weights")
    ] = "auto"
    context_length: Annotated[int | None, Setting("Tokens of context; default: the model's own")] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Setting("Type of weights, activations and KV; auto: the model's, on a CPU bfloat16 where it is native"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Setting(
            "On a CPU: weights of 8 or 4 bits, multiplied with activations of 8; default: weights as --dtype has them"
        ),
    ] = None
    weight_cache: Annotated[
        str, Setting("Folder that keeps dequantised GGUF weights for the next start; auto: ~/.cache/tercet; off: none")
    ] = "auto"
    chat_template: Annotated[str | None, Setting("Jinja chat template: a file, or the text itself")] = None
    served_model_name: Annotated[str | None, _server("Name that clients use; default: model-path")] = None
    host: Annotated[str, _server("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _server("TCP port to listen on; 0: any free one")] = 30000
    api_key: Annotated[str | None, _server("Key that every request must bear (or TERCET_API_KEY)")] = None
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Setting("Where unset sampling parameters come from: the model's generation_config, or OpenAI's defaults"),
    ] = "model"
    stream_interval: Annotated[int, Setting("Tokens between two chunks of a stream")] = 1
    incremental_streaming_output: Annotated[
        bool, _server("/generate streams deltas instead of cumulative text and ids")
    ] = False
    allow_auto_truncate: Annotated[
        bool, Setting("Cut a prompt that is too long at its front instead of refusing it")
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], Setting("Where the model runs")] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "torch", "triton"],
        Setting("Attention and layers; auto: triton on a GPU, on a CPU its compiled operations (cpu), else torch"),
    ] = "auto"
    mem_fraction_static: Annotated[
        float | None,
        Setting(
            "Share of the memory for weights and KV; default: all that steps leave of a GPU, a modest pool on a CPU"
        ),
    ] = None
    max_total_tokens: Annotated[int | None, Setting("Tokens of the KV pool; default: from the memory")] = None
    max_running_requests: Annotated[int, Setting("Requests that may run at once")] = 256
    max_queued_requests: Annotated[int, Setting("Requests that may wait; one more is answered 503")] = 4096
    chunked_prefill_size: Annotated[
        int | None, Setting("Most tokens of one prompt in one step; default: 8192 on a GPU, 1024 on a CPU")
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Setting("Most prompt tokens of all requests in one step; default: 16384 on a GPU, 2048 on a CPU"),
    ] = None
    enable_mixed_chunk: Annotated[bool, Setting("Decode running requests in the same step as a prefill")] = False
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"], Setting("Order of the waiting queue: arrival, or longest cached prefix first")
    ] = "lpm"
    schedule_conservativeness: Annotated[
        float, Setting("Above 1: reserve more KV for running requests, retract less")
    ] = 1.0
    page_size: Annotated[
        int | None, Setting("Tokens of a KV page; default: 1, or 32 on a CPU whose compiled operations suit the model")
    ] = None
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "fifo", "mru", "filo"], Setting("Which cached prefixes go first")
    ] = "lru"
    disable_radix_cache: Annotated[bool, Setting("Share no prefixes")] = False
    disable_overlap_schedule: Annotated[
        bool, Setting("Plan a step only when the last one's tokens are home, as a CPU always does")
    ] = False
    disable_cuda_graph: Annotated[
        bool, Setting("Record no decode steps: launch every kernel or operation of one by itself")
    ] = False
    cuda_graph_max_bs: Annotated[int | None, Setting("Requests of the largest recorded decode step; default: 256")] = (
        None
    )
    random_seed: Annotated[
        int | None,
        Setting("Seed of the seeds of requests that bring none, and of dummy weights; default: drawn at each start"),
    ] = None
    watchdog_timeout: Annotated[float, Setting("Seconds of one step after which the engine counts as hung")] = 300.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Setting("Least level logged")] = "info"
    decode_log_interval: Annotated[int, Setting("Decode steps between two log lines")] = 40

    def __post_init__(self) -> None:
        for name in (
            "context_length",
            "stream_interval",
            "max_total_tokens",
            "max_running_requests",
            "max_queued_requests",
            "chunked_prefill_size",
            "max_prefill_tokens",
            "page_size",
            "cuda_graph_max_bs",
            "decode_log_interval",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {value}")
        if self.page_size is not None and self.page_size > 1024:
            raise ValueError(f"--page-size must be at most 1024, got {self.page_size}")
        for name, num_pages in (("chunked_prefill_size", 1), ("max_prefill_tokens", 1), ("max_total_tokens", 2)):
            value = getattr(self, name)
            least = num_pages * (self.page_size or 1)
            if value is not None and value < least:
                raise ValueError(
                    f"{_flag(name)} must be at least {least} with --page-size {self.page_size}, got {value}"
                )
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in [0, 65535], got {self.port}")
        if self.api_key is not None:
            if not self.api_key:
                raise ValueError("--api-key (or TERCET_API_KEY) must not be empty; leave it out to serve without a key")
            if any(char.isspace() or not char.isprintable() for char in self.api_key):
                raise ValueError("--api-key (or TERCET_API_KEY) must have no spaces, line breaks or control characters")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ValueError(f"--mem-fraction-static must be in (0, 1), got {self.mem_fraction_static}")
        if not self.schedule_conservativeness > 0:
            raise ValueError(f"--schedule-conservativeness must be positive, got {self.schedule_conservativeness}")
        if not self.watchdog_timeout > 0:
            raise ValueError(f"--watchdog-timeout must be positive, got {self.watchdog_timeout}")

    def with_seed(self) -> ServerArgs:
        """The same settings with a random seed: one drawn from the system where none is set."""
        if self.random_seed is not None:
            return self
        return dataclasses.replace(self, random_seed=secrets.randbits(32))

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerArgs:
        """From keyword arguments or a parsed file; raises ValueError on an unknown name or a wrong type."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class _Flag:
    """One field, as argparse and the docs want it."""

    name: str
    type: type
    choices: tuple[str, ...] | None
    optional: bool
    default: Any
    setting: Setting


def _flags() -> list[_Flag]:
    hints = typing.get_type_hints(ServerArgs, include_extras=True)
    flags = []
    for field in dataclasses.fields(ServerArgs):
        annotated = hints[field.name]
        base, setting = get_args(annotated)
        optional = False
        if get_origin(base) in (types.UnionType, typing.Union):  # of a Literal: the latter
            optional = True
            base = next(arg for arg in get_args(base) if arg is not type(None))
        choices = get_args(base) if get_origin(base) is Literal else None
        default = None if field.default is dataclasses.MISSING else field.default
        flags.append(_Flag(field.name, str if choices else base, choices, optional, default, setting))
    return flags


def add_arguments(parser: argparse.ArgumentParser, *, model_required: bool = True) -> None:
    """Adds a flag for every setting, and `--config FILE` (YAML of the same names; the command line wins)."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags given here win over it")
    for flag in _flags():
        if flag.type is bool:
            parser.add_argument(
                _flag(flag.name), action="store_true", default=argparse.SUPPRESS, help=flag.setting.help
            )
            continue
        shown = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(
            _flag(flag.name),
            type=flag.type,
            choices=flag.choices,
            default=argparse.SUPPRESS,
            metavar=None if flag.choices else flag.type.__name__.upper(),
            help=(flag.setting.help + shown).replace("%", "%%"),
        )


def from_namespace(namespace: argparse.Namespace) -> ServerArgs:
    """Settings from parsed arguments; raises ValueError where they do not fit."""
    known = {flag.name for flag in _flags()}
    values: dict[str, Any] = {}
    if getattr(namespace, "config", None):
        values.update(_read_config(namespace.config))
    values.update({key: value for key, value in vars(namespace).items() if key in known})
    if "api_key" not in values:
        values["api_key"] = env.api_key()
    if isinstance(values["api_key"], str):
        values["api_key"] = values["api_key"].strip()  # a file that holds a key usually ends in a line break
    return ServerArgs.from_dict(values)


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """The command line of `python -m tercet.launch_server`; leaves by SystemExit(2) with a message when it is wrong."""
    parser = argparse.ArgumentParser(prog="tercet.launch_server", description="Serve a model over HTTP.")
    add_arguments(parser)
    namespace = parser.parse_args(argv)
    try:
        return from_namespace(namespace)
    except ValueError as error:
        parser.error(str(error))


def _read_config(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: expected settings by name, got {type(content).__name__}")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def docs_table() -> str:
    """The table of docs/server_args.md."""
    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for flag in _flags():
        values = " \\| ".join(flag.choices) if flag.choices else flag.type.__name__
        default = "required" if flag.name == "model_path" else "-" if flag.default is None else f"`{flag.default}`"
        kind = "" if flag.type is bool else f" {values}"
        rows.append(f"| `{_flag(flag.name)}`{kind} | {default} | {flag.setting.help} |")
    return "\n".join(rows) + "\n"
