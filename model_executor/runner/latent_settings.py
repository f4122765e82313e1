"""The settings for which latent attention (MLA) has no kernels."""

from __future__ import annotations

import torch

from ...srt.server_args import ServerArgs


def check_latent_attention(server_args: ServerArgs, backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError for a setting that a model with latent attention does not have."""
    if server_args.kv_cache_dtype != "auto":
        raise ValueError(
            f"--kv-cache-dtype must be auto for a model with latent attention, got {server_args.kv_cache_dtype!r}"
        )
    flags = {"--hopper-prefill": server_args.hopper_prefill, "--fuse-small-steps": server_args.fuse_small_steps}
    for flag, is_set in flags.items():
        if is_set:
            raise ValueError(f"{flag} has no kernels for latent attention: leave it out")
    # Products of float32 have no matrix units there, so operands and sums of 512 components would be in registers.
    if backend == "triton" and device.type == "cuda" and dtype == torch.float32:
        raise ValueError("latent attention needs --dtype bfloat16 or float16 on a GPU, got float32")
