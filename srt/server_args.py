"""The settings of an engine. Each is one annotated field.

The command line, its help, the docs table and the validation are made from these fields alone.
"""

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
    """The annotation of a field: its line of help, and whether only the HTTP server has it."""

    help: str
    server_only: bool = False


def _server(text: str) -> Setting:
    return Setting(text, server_only=True)


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The settings of an engine. They are frozen: a change makes a new object (`dataclasses.replace`).

    Raises ValueError that names the flag, the given value and the allowed ones.
    """

    model_path: Annotated[str, Setting("Hugging Face directory, .gguf file, or config.json (dummy weights)")]
    tokenizer_path: Annotated[
        str | None, Setting("Directory or .gguf file of the tokenizer; default: --model-path")
    ] = None
    skip_tokenizer_init: Annotated[bool, Setting("Load no tokenizer: prompts and answers are token ids")] = False
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], Setting("Format of the weights; dummy: random weights")
    ] = "auto"
    context_length: Annotated[int | None, Setting("Maximum context length in tokens; default: the model's")] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Setting(
            "Data type of weights, activations and KV; auto: float16 or bfloat16 on a GPU, bfloat16 or float32 on a CPU"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Setting("CPU only: 8-bit or 4-bit weights, multiplied with 8-bit activations; default: weights in --dtype"),
    ] = None
    weight_cache: Annotated[
        str,
        Setting("Folder that caches dequantised GGUF weights for later starts; auto: ~/.cache/tercet; off: no cache"),
    ] = "auto"
    chat_template: Annotated[str | None, Setting("Jinja chat template: a file or the template itself")] = None
    served_model_name: Annotated[str | None, _server("Model name in the API; default: --model-path")] = None
    host: Annotated[str, _server("Address to listen on")] = "127.0.0.1"
    port: Annotated[int, _server("TCP port to listen on; 0: any free port")] = 30000
    api_key: Annotated[str | None, _server("API key that clients must send; default: the variable TERCET_API_KEY")] = (
        None
    )
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        Setting("Source of default sampling parameters: the model's generation_config, or OpenAI's defaults"),
    ] = "model"
    stream_interval: Annotated[int, Setting("Number of tokens between two chunks of a stream")] = 1
    incremental_streaming_output: Annotated[
        bool, _server("/generate streams only new text and ids in each event, instead of all so far")
    ] = False
    allow_auto_truncate: Annotated[
        bool, Setting("Drop the first tokens of a prompt that is too long, instead of refusing it")
    ] = False
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Setting("Device of the model; auto: a GPU if there is one, else the CPU")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "torch", "triton"],
        Setting("Implementation of attention and layers; auto: triton on a GPU; cpu (C++) or else torch on a CPU"),
    ] = "auto"
    mem_fraction_static: Annotated[
        float | None,
        Setting("Fraction of memory for weights and KV; default: on a GPU all that steps leave, on a CPU a small pool"),
    ] = None
    max_total_tokens: Annotated[
        int | None, Setting("Size of the KV pool in tokens; default: computed from the memory")
    ] = None
    max_running_requests: Annotated[int, Setting("Maximum number of running requests")] = 256
    max_queued_requests: Annotated[
        int, Setting("Maximum number of waiting requests; further requests get status 503")
    ] = 4096
    chunked_prefill_size: Annotated[
        int | None, Setting("Maximum number of tokens of one prompt in a step; default: 8192 on a GPU, 1024 on a CPU")
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Setting("Maximum number of prompt tokens of all requests in a step; default: 16384 on a GPU, 2048 on a CPU"),
    ] = None
    enable_mixed_chunk: Annotated[
        bool, Setting("Let running requests decode in the steps that prefill other requests")
    ] = False
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Setting("Order of the waiting queue; fcfs: first come, first served; lpm: longest cached prefix first"),
    ] = "lpm"
    schedule_conservativeness: Annotated[
        float, Setting("A value above 1 reserves more KV for running requests, so fewer are retracted")
    ] = 1.0
    page_size: Annotated[
        int | None, Setting("Tokens in a KV page; default: 1, or 32 on a CPU whose C++ kernels support the model")
    ] = None
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "fifo", "mru", "filo"], Setting("Order in which cached prefixes are evicted")
    ] = "lru"
    disable_radix_cache: Annotated[bool, Setting("Cache and share no prefixes")] = False
    disable_overlap_schedule: Annotated[
        bool, Setting("Plan a step only after the tokens of the last step are known, as is always done on a CPU")
    ] = False
    disable_cuda_graph: Annotated[
        bool, Setting("Do not record decode steps: launch each kernel or operation separately")
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None, Setting("Batch size of the largest recorded decode step; default: 256")
    ] = None
    random_seed: Annotated[
        int | None,
        Setting("Seed for requests without a seed and for dummy weights; default: random at each start"),
    ] = None
    watchdog_timeout: Annotated[float, Setting("Seconds that a step may take before the engine counts as hung")] = 300.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Setting("Lowest level of log messages that are shown")
    ] = "info"
    decode_log_interval: Annotated[int, Setting("Number of decode steps between two log lines")] = 40

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
                raise ValueError(
                    "--api-key (or TERCET_API_KEY) must not contain spaces, line breaks or control characters"
                )
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ValueError(f"--mem-fraction-static must be in (0, 1), got {self.mem_fraction_static}")
        if not self.schedule_conservativeness > 0:
            raise ValueError(f"--schedule-conservativeness must be positive, got {self.schedule_conservativeness}")
        if not self.watchdog_timeout > 0:
            raise ValueError(f"--watchdog-timeout must be positive, got {self.watchdog_timeout}")

    def with_seed(self) -> ServerArgs:
        """The same settings with `random_seed` set. If it is None, a seed is drawn from the system."""
        if self.random_seed is not None:
            return self
        return dataclasses.replace(self, random_seed=secrets.randbits(32))

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model_path

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerArgs:
        """Make settings from keyword arguments or a parsed file. Raises ValueError for a wrong name or type."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown setting {', '.join(unknown)}; known settings: {', '.join(sorted(known))}")
        try:
            return msgspec.convert(dict(values), cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class _Flag:
    """A field in the form that argparse and the docs table need."""

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
        if get_origin(base) in (types.UnionType, typing.Union):  # `Literal[...] | None` is a typing.Union
            optional = True
            base = next(arg for arg in get_args(base) if arg is not type(None))
        choices = get_args(base) if get_origin(base) is Literal else None
        default = None if field.default is dataclasses.MISSING else field.default
        flags.append(_Flag(field.name, str if choices else base, choices, optional, default, setting))
    return flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting, and `--config FILE`: a YAML file of settings, which flags override."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; the command line overrides it")
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
    """Make settings from parsed arguments. Raises ValueError as ServerArgs does."""
    known = {flag.name for flag in _flags()}
    values: dict[str, Any] = {}
    if getattr(namespace, "config", None):
        values.update(_read_config(namespace.config))
    values.update({key: value for key, value in vars(namespace).items() if key in known})
    if "api_key" not in values:
        values["api_key"] = env.api_key()
    if isinstance(values["api_key"], str):
        values["api_key"] = values["api_key"].strip()  # a key from a file usually ends with a line break
    return ServerArgs.from_dict(values)


def parse_args(argv: Sequence[str]) -> ServerArgs:
    """Parse the command line of `python -m tercet.launch_server`. Exits with a message (status 2) if it is wrong."""
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
        raise ValueError(f"--config {path} must contain a YAML mapping of settings, got {type(content).__name__}")
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
