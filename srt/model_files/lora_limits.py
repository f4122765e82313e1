"""The memory for LoRA adapters that the settings leave open: the number of slots, and the highest rank."""

from __future__ import annotations

import dataclasses

from ..server_args import ServerArgs
from .lora_config import read_lora_config

LEAST_SLOTS = 4
DEFAULT_RANK = 16


def with_lora_limits(args: ServerArgs) -> ServerArgs:
    """The same settings with `max_loras` and `max_lora_rank`, if the server has adapters.

    They stay when adapters are loaded and unloaded later, also in a restarted engine. Raises ValueError for an adapter
    of --lora-paths that cannot be read.
    """
    if not args.enable_lora:
        return args
    paths = args.adapter_paths
    rank = args.max_lora_rank
    if rank is None:
        rank = max((_rank_of(name, path) for name, path in paths.items()), default=DEFAULT_RANK)
    return dataclasses.replace(args, max_loras=args.max_loras or max(len(paths), LEAST_SLOTS), max_lora_rank=rank)


def _rank_of(name: str, path: str) -> int:
    try:
        return read_lora_config(path).rank
    except ValueError as error:
        raise ValueError(f"--lora-paths: {name!r} cannot be used: {error}") from error
