"""Attention shapes that occur in serving, as meta tensors without memory, to compile kernels ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tercet.model_executor.device.dtypes import dtype_name

BATCH, TOKENS, CONTEXT, SLOTS = 64, 4096, 131072, 400_000


@dataclass(frozen=True)
class Shape:
    head_dim: int
    num_heads: int = 32
    num_kv_heads: int = 8
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    soft_cap: float | None = None
    window: int | None = None
    has_sinks: bool = False

    @property
    def fp32(self) -> bool:
        return self.dtype == torch.float32

    @property
    def kind(self) -> str:
        return "fp8" if self.fp8 else dtype_name(self.dtype)

    def __str__(self) -> str:
        options = ("-cap" if self.soft_cap else "") + ("-window" if self.window else "")
        options += "-sinks" if self.has_sinks else ""
        return f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}-{self.kind}{options}"


SHAPES = [
    Shape(64),  # Llama-3.2-1B
    Shape(64, 9, 3),  # SmolLM2-135M
    Shape(128),  # Llama-3.1-8B
    Shape(128, 16, 8),  # Qwen3-0.6B
    Shape(128, 40, 8, window=4096),  # Qwen3-14B, and a window
    Shape(64, 64, 8, window=128, has_sinks=True),  # GPT-OSS
    Shape(80, 32, 32),
    Shape(96, 32, 32),
    Shape(192),
    Shape(256, 8, 4, soft_cap=50.0, window=4096),  # Gemma 2 has it in every other layer
    Shape(256, 8, 4, soft_cap=50.0),
    Shape(128, dtype=torch.float16),
    Shape(64, 9, 3, dtype=torch.float32),
    Shape(128, dtype=torch.float32),
    Shape(256, dtype=torch.float32),
    Shape(64, fp8=True),
    Shape(128, fp8=True),
    Shape(256, fp8=True),
]


BY_NAME = {str(shape): shape for shape in SHAPES}
DEFAULT = BY_NAME["32x8x128-bfloat16"]
"""The shape that tests compile with every kernel and for every GPU."""


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(shape: Shape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (a view of a fused projection), the K pool, the V pool and the slot table. Both pools are one tensor."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    q = meta(num_tokens, heads, shape.head_dim, dtype=shape.dtype)[:, : shape.num_heads]
    pool = meta(
        SLOTS, shape.num_kv_heads, shape.head_dim, dtype=torch.float8_e4m3fn if shape.fp8 else shape.dtype
    )  # fmt: skip
    return q, pool, pool, meta(257, CONTEXT, dtype=torch.int32)


def options(shape: Shape) -> dict[str, float | int | torch.Tensor | None]:
    sinks = meta(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
    return {"sm_scale": shape.head_dim**-0.5, "soft_cap": shape.soft_cap, "window": shape.window, "sinks": sinks}
