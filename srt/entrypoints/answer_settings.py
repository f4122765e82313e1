"""What an answer depends on besides its request: the model, and the settings that decide tokens or their form.

A stream of `--resume-file` continues only on a server where all of this is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator

from ... import __version__
from ..model_files.fingerprint import fingerprint, weight_fingerprints
from ..model_files.model_config import ModelConfig
from ..server_args import ServerArgs
from ..start_reports import SchedulerReady

_SETTINGS = (
    "skip_tokenizer_init",
    "kv_cache_dtype",
    "quantization",
    "tool_call_parser",
    "reasoning_parser",
    "sampling_defaults",
    "incremental_streaming_output",
    "grammar_backend",
    "allow_auto_truncate",
    "fuse_small_steps",
    "hopper_prefill",
)
_TOKENIZER_ENDINGS = (".json", ".jinja", ".model", ".txt")


def answer_settings(args: ServerArgs, config: ModelConfig, facts: SchedulerReady) -> dict[str, str]:
    """The settings by name, as text. Reads a part of the model's files. Raises as `weight_files`."""
    settings = {name: str(getattr(args, name)) for name in _SETTINGS}
    shape = {name: value for name, value in dataclasses.asdict(config).items() if name != "model_path"}
    weights = [str(args.random_seed)] if config.load_format == "dummy" else list(weight_fingerprints(config))
    return settings | {
        "version": __version__,
        "served_model_name": args.model_name,
        "model": _digest(json.dumps(shape, sort_keys=True), *weights),
        "tokenizer": _digest(*_tokenizer_files(args)),
        "chat_template": _digest(_content(args.chat_template or "")),
        "dtype": facts.dtype,
        "device": facts.device,
        "attention_backend": facts.attention_backend,
        "cpu_build": "" if facts.cpu_kernels is None else facts.cpu_kernels.build,
        "linears": "" if facts.cpu_kernels is None else facts.cpu_kernels.linears,
        "bfloat16_products": "" if facts.cpu_kernels is None else facts.cpu_kernels.bfloat16,
        "context_length": str(facts.context_len),
        "stores_responses": str(args.response_store_mib > 0),
    }


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The names of the settings that differ."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _tokenizer_files(args: ServerArgs) -> Iterator[str]:
    path = args.tokenizer_path or args.model_path
    if not os.path.isdir(path):
        yield _content(path)
        return
    for name in sorted(os.listdir(path)):
        if name.endswith(_TOKENIZER_ENDINGS):
            yield name
            yield fingerprint(os.path.join(path, name))


def _content(given: str) -> str:
    """The fingerprint of a file. A text that names no file, such as a template or a name for transformers, is returned
    unchanged."""
    return fingerprint(given) if os.path.isfile(given) else given


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
