"""RMSNorm (arXiv 1910.07467), with the addition of the residual before it or after it, and that of queries and keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import has_dense_rows
from .tuning import next_power_of_2, row_warps

_MAX_WIDTH = 2**15


@triton.jit
def _scaled(x, weight_ptr, i, mask, eps, width):
    """The norm of a row of `width` numbers, x, in float32."""
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight


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
    out = _scaled(x, weight_ptr, i, mask, eps, WIDTH)
    tl.store(out_ptr + row * WIDTH + i, out.to(out_ptr.dtype.element_ty), mask=mask)


@bound
@triton.jit
def _add_rmsnorm_kernel(x_ptr, weight_ptr, residual_ptr, stride_x, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < WIDTH
    x = tl.load(x_ptr + row * stride_x + i, mask=mask, other=0.0).to(tl.float32)
    target = residual_ptr + row * WIDTH + i
    out = tl.load(target, mask=mask, other=0.0).to(tl.float32) + _scaled(x, weight_ptr, i, mask, eps, WIDTH)
    tl.store(target, out.to(residual_ptr.dtype.element_ty), mask=mask)


@bound
@triton.jit
def _qk_rmsnorm_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, stride, eps, Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = qkv_ptr + tl.program_id(0).to(tl.int64) * stride
    i = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        mask = i < Q_SIZE
        x = tl.load(row + i, mask=mask, other=0.0).to(tl.float32)
        out = _scaled(x, q_weight_ptr, i, mask, eps, Q_SIZE)
        tl.store(row + i, out.to(qkv_ptr.dtype.element_ty), mask=mask)
    else:
        mask = i < K_SIZE
        x = tl.load(row + Q_SIZE + i, mask=mask, other=0.0).to(tl.float32)
        out = _scaled(x, k_weight_ptr, i, mask, eps, K_SIZE)
        tl.store(row + Q_SIZE + i, out.to(qkv_ptr.dtype.element_ty), mask=mask)


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


def add_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> None:
    """Add x / rms(x) * weight to the residual in place. The sum is computed in float32.

    x: [T, n], last dimension contiguous. weight: [n]. residual: [T, n], contiguous, of x's dtype.
    """
    num_tokens, width = x.shape
    assert has_dense_rows(x) and weight.shape == (width,) and weight.is_contiguous() and width <= _MAX_WIDTH
    assert residual.shape == x.shape and residual.is_contiguous() and residual.dtype == x.dtype
    block = next_power_of_2(width)
    if num_tokens:
        _add_rmsnorm_kernel[(num_tokens,)](
            x, weight, residual, x.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=row_warps(block)
        )


def qk_rmsnorm(qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> None:
    """Normalise the queries of each token, all heads together, and its keys. Both change in place.

    qkv: [T, q_size + k_size + ...], last dimension contiguous. q_weight: [q_size]. k_weight: [k_size].
    """
    q_size, k_size = len(q_weight), len(k_weight)
    assert has_dense_rows(qkv) and qkv.shape[1] >= q_size + k_size and q_weight.is_contiguous()
    assert k_weight.is_contiguous() and q_weight.dtype == k_weight.dtype and max(q_size, k_size) <= _MAX_WIDTH
    block = next_power_of_2(max(q_size, k_size))
    if len(qkv):
        _qk_rmsnorm_kernel[(len(qkv), 2)](
            qkv, q_weight, k_weight, qkv.stride(0), eps, Q_SIZE=q_size, K_SIZE=k_size, BLOCK=block,
            num_warps=row_warps(block),
        )  # fmt: skip


def rmsnorm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`rmsnorm` in plain torch."""
    if residual is not None:
        residual += x
        x = residual
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
