"""Checks the flags of kernels, which not every backend, type and device has."""

from __future__ import annotations

import torch

from ...srt.server_args import ServerArgs
from ..device.dtypes import dtype_name
from ..kernels.tuning import HOPPER_HEAD_DIMS, HOPPER_PAGE


def check_kernel_flags(server_args: ServerArgs, backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError for a flag of kernels that this backend, type or device does not have."""
    if server_args.fuse_small_steps and (backend != "triton" or dtype == torch.float16):
        raise ValueError(
            f"--fuse-small-steps needs triton attention and bfloat16 or float32, got {backend} and {dtype_name(dtype)}"
        )
    if server_args.cpu_kernels not in ("auto", "fixed") and backend != "cpu":
        raise ValueError(
            f"--cpu-kernels {server_args.cpu_kernels} needs the attention backend cpu, but it is {backend}"
        )
    if server_args.dependent_launch and not (server_args.fuse_small_steps and _nvidia_capability(device) >= (9, 0)):
        raise ValueError(
            "--dependent-launch needs --fuse-small-steps and an NVIDIA GPU of compute capability 9.0 or higher"
        )


def check_hopper_prefill(
    backend: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, page_size: int
) -> None:
    """Raise ValueError where `hopper_extend_attention` does not run."""
    if backend != "triton" or not _is_hopper(device):
        raise ValueError("--hopper-prefill needs triton attention and an NVIDIA GPU of compute capability 9.0")
    if dtype != torch.bfloat16 or kv_dtype != torch.bfloat16:
        names = [dtype_name(kind) for kind in (dtype, kv_dtype)]
        raise ValueError(f"--hopper-prefill needs bfloat16 for activations and KV, got {names[0]} and {names[1]}")
    if head_dim not in HOPPER_HEAD_DIMS:
        raise ValueError(f"--hopper-prefill needs heads of 64 or 128 components, but the model's have {head_dim}")
    if page_size % HOPPER_PAGE:
        raise ValueError(f"--hopper-prefill needs a page size of a multiple of {HOPPER_PAGE} tokens, got {page_size}")


def _is_hopper(device: torch.device) -> bool:
    return _nvidia_capability(device) == (9, 0)


def _nvidia_capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for another device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)
