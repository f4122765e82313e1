"""The settings for a model with recurrent layers, whose requests have states (row_states.py)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ...srt.model_files.delta_net_config import DeltaNetConfig
from ...srt.model_files.model_config import ModelConfig
from ...srt.server_args import ServerArgs
from ..row_states import LayerStates, make_row_states, state_bytes

if TYPE_CHECKING:  # it imports this file
    from .settings import RunnerSettings

logger = logging.getLogger(__name__)

_DEFAULT_ROWS = 256
_LEAST_ROWS = 8
_REQUEST_BYTES = 2 << 30, 8 << 30
"""Memory of the states of requests by default: on a CPU, and on a GPU, but there at most a tenth of its memory."""
_SAVED_BYTES = 1 << 30, 8 << 30
"""The same of saved states."""


def gpu_bytes_of(device: torch.device) -> int | None:
    """The memory of a GPU; None for another device."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def resolve_rows(
    server_args: ServerArgs,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    gpu_bytes: int | None = None,
) -> int:
    """The number of requests that may run at once: the setting, or 256, or fewer if their states are large.

    `gpu_bytes`: the memory of the GPU; None: it is not known.
    """
    if server_args.max_running_requests is not None:
        return server_args.max_running_requests
    if config.delta_net is None:
        return _DEFAULT_ROWS
    return _default_rows(_REQUEST_BYTES, config.delta_net, dtype, device, gpu_bytes)


def resolve_saved_states(
    server_args: ServerArgs,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    gpu_bytes: int | None = None,
) -> int | None:
    """The number of states that the prefix cache keeps: the setting, or 256, or fewer if they are large.

    None: the model has no recurrent layers, or requests share no prefixes. `gpu_bytes`: as of `resolve_rows`.
    """
    if config.delta_net is None or server_args.disable_radix_cache:
        return None
    return server_args.max_saved_states or _default_rows(_SAVED_BYTES, config.delta_net, dtype, device, gpu_bytes)


def _default_rows(
    most_bytes: tuple[int, int],
    sizes: DeltaNetConfig,
    dtype: torch.dtype,
    device: torch.device,
    gpu_bytes: int | None,
) -> int:
    num_bytes = most_bytes[device.type != "cpu"]
    if gpu_bytes is not None:
        num_bytes = min(num_bytes, gpu_bytes // 10)
    return min(_DEFAULT_ROWS, max(_LEAST_ROWS, num_bytes // state_bytes(sizes, dtype.itemsize)))


def states_of_settings(settings: RunnerSettings, sizes: DeltaNetConfig) -> tuple[LayerStates, ...]:
    """Make the states of a server. Raises ValueError that names the settings if there is no memory for them."""
    num_rows, num_saved = settings.max_running_requests, settings.max_saved_states or 0
    mib = state_bytes(sizes, settings.dtype.itemsize) / 2**20
    try:
        states = make_row_states(num_rows + num_saved, sizes, settings.dtype, settings.device)
    except (OSError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"no memory for the states of --max-running-requests {num_rows} and --max-saved-states {num_saved}, "
            f"{mib:.1f} MiB each; lower one of them"
        ) from error
    logger.info(
        "The states of recurrent layers take %.1f MiB for each of at most %d running requests and %d saved prefixes",
        mib,
        num_rows,
        num_saved,
    )
    return states
