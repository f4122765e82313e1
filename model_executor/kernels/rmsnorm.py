"""RMSNorm (arXiv 1910.07467), with or without the addition of the residual before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import has_dense_rows
from .tuning import next_power_of_2, row_warps

_MAX_WIDTH = 2**15


@bound
@triton.jit
def _rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    eps,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < WIDTH
    x = tl.load(x_ptr + row * stride_x + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * WIDTH + i, mask=mask, other=0.0).to(tl.float32)
        # Normalise the rounded value, which the next block reads back.
        stored = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * WIDTH + i, stored, mask=mask)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + i, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x / rms(x) * weight in float32. Returns [T, n] in x's dtype.

    x: [T, n], last dimension contiguous. weight: [n]. residual: [T, n], contiguous, of x's dtype. If it is given, x is
    added to it in place, and the result is the norm of the new residual.
    """
    num_tokens, width = x.shape
    assert has_dense_rows(x) and weight.shape == (width,) and weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.is_contiguous() and residual.dtype == x.dtype)
    assert width <= _MAX_WIDTH
    block = next_power_of_2(width)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        _rmsnorm_kernel[(num_tokens,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.stride(0),
            eps,
            WIDTH=width,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return out


def rmsnorm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`rmsnorm` in plain torch."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
