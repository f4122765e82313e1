"""Which floating-point type a model computes in."""

from __future__ import annotations

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """`name`: "auto" or a key of DTYPES. `checkpoint`: the dtype of the weights as stored, None where unknown.

    "auto" is, on a GPU, the checkpoint's own 16-bit type, and bfloat16 for any other; on a CPU bfloat16 where the
    processor multiplies it natively, else float32. Raises ValueError for another name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    if device.type == "cpu":
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def cpu_multiplies_bfloat16() -> bool:
    """AVX512-BF16 or AMX. (oneDNN "supports" bfloat16 from AVX512 on, by way of float32, which is slower.)"""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
