"""The settings that a model with recurrent layers does not have."""

from __future__ import annotations

from ..kv_events import read_config
from ..server_args import ServerArgs
from .model_config import ModelConfig


def check_recurrence(args: ServerArgs, config: ModelConfig) -> None:
    """Raises ValueError for settings that do not suit a model with recurrent layers, or one without them."""
    if config.delta_net is None:
        if args.max_saved_states is not None:
            raise ValueError("--max-saved-states is for models with recurrent layers, and this one has none")
        return
    refused = {
        "--enable-hierarchical-cache": (args.enable_hierarchical_cache, "host memory and files keep no states"),
        "--kv-events-config": (
            read_config(args.kv_events_config) is not None,
            "a router would count on blocks that no request can use without their states",
        ),
        "--speculative-algorithm": (args.speculative_algorithm is not None, "they cannot take back a draft"),
        "--fuse-small-steps": (args.fuse_small_steps, "it has no kernels for them"),
    }
    for flag, (is_set, reason) in refused.items():
        if is_set:
            raise ValueError(f"{flag} is not supported for a model with recurrent layers: {reason}")
