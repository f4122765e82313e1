"""The types that a model computes in, and their names."""

from __future__ import annotations

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_name(dtype: torch.dtype) -> str:
    """The name without `torch.`, as settings and files have it."""
    return str(dtype).removeprefix("torch.")


def resolve_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """Turn the setting `name` ("auto" or a key of DTYPES) into a type. `checkpoint`: type of the stored weights.

    "auto" on a GPU: float16 for a float16 checkpoint, else bfloat16. "auto" on a CPU: bfloat16 if the processor
    multiplies it natively, else float32. `checkpoint` is None if unknown. Raises ValueError for another name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    if device.type == "cpu":
        return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def cpu_multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively, by AVX512-BF16 or AMX.

    With plain AVX512, oneDNN also takes bfloat16, but converts it to float32, which is slower.
    """
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
