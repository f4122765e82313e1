"""The floating-point type that a model computes in."""

from __future__ import annotations

import torch

from .. import cpu_extension

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """Turn the setting `name` ("auto" or a key of DTYPES) into a type. `checkpoint`: type of the stored weights.

    "auto" on a GPU: float16 for a float16 checkpoint, else bfloat16. "auto" on a CPU: bfloat16 if this is as fast as
    float32 or faster, else float32. `checkpoint` is None if unknown. Raises ValueError for another name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, got {name!r}")
    if device.type == "cpu":
        return torch.bfloat16 if is_bfloat16_fast_on_cpu() else torch.float32
    return torch.float16 if checkpoint == "float16" else torch.bfloat16


def is_bfloat16_fast_on_cpu() -> bool:
    """Whether the CPU multiplies bfloat16 at the rate of float32 or faster.

    The compiled operations do, on every processor. Without them the processor must do it natively, by AVX512-BF16 or
    AMX: elsewhere oneDNN converts bfloat16 to float32 at each call, which is slower.
    """
    return (
        cpu_extension.multiplies(torch.bfloat16)
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )
