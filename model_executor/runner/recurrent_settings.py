"""The settings for a model with recurrent layers, whose requests have states (row_states.py)."""

from __future__ import annotations

import logging

import torch

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.model_config import ModelConfig
from ...srt.server_args import ServerArgs
from ..row_states import LayerStates, make_row_states, state_bytes

logger = logging.getLogger(__name__)

DEFAULT_ROWS = 256
_LEAST_ROWS = 8
_DEFAULT_BYTES = {"cpu": 2 << 30, "cuda": 8 << 30}
"""Memory of all states by default, by the type of the device."""


def resolve_rows(server_args: ServerArgs, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """The number of requests that may run at once: the setting, or DEFAULT_ROWS, or fewer if their states are large.

    Raises ValueError for a setting that a model with recurrent layers does not have.
    """
    if config.delta_net is not None:
        _check_recurrent_layers(server_args)
    if server_args.max_running_requests is not None:
        return server_args.max_running_requests
    if config.delta_net is None:
        return DEFAULT_ROWS
    fits = _DEFAULT_BYTES[device.type] // state_bytes(config.delta_net, dtype.itemsize)
    return min(DEFAULT_ROWS, max(_LEAST_ROWS, fits))


def _check_recurrent_layers(server_args: ServerArgs) -> None:
    """Raise ValueError for a setting that a model with recurrent layers does not have."""
    if server_args.speculative_algorithm is not None:
        raise ValueError(
            f"--speculative-algorithm {server_args.speculative_algorithm} is not supported for a model with recurrent "
            "layers: they cannot take back a draft"
        )
    if server_args.fuse_small_steps:
        raise ValueError("--fuse-small-steps has no kernels for recurrent layers: leave it out")


def states_of_settings(
    num_rows: int, sizes: DeltaNetConfig, dtype: torch.dtype, device: torch.device
) -> tuple[LayerStates, ...]:
    """Make the states of a server. Raises ValueError that names the setting if there is no memory for them."""
    mib = state_bytes(sizes, dtype.itemsize) / 2**20
    try:
        states = make_row_states(num_rows, sizes, dtype, device)
    except (OSError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"no memory for the states of --max-running-requests {num_rows}, {mib:.1f} MiB each; lower it"
        ) from error
    logger.info("The states of recurrent layers take %.1f MiB for each of at most %d running requests", mib, num_rows)
    return states
