"""Linear layers of at most 8 rows, with the norm before them and the residual sum or the gated activation after them.

A product of so few rows takes as long as reading its weight. So what lies between two products should cost no launch:
one kernel computes

    out = epilogue(rms_norm(x) @ weight.T + bias)

A program has BLOCK_N outputs of all rows, and reads its part of the weight once, in order. The weight does not wait for
the norm: rms_norm(x) = x * norm_weight * scale, with one scale for each row, so the product is scaled at its end.

The weight is the first operand of a product on matrix units, 16 outputs by 16 inputs, and x the second, 16 inputs by
8 rows. Each warp has a slice of the inputs in every block, and sums of its own, which are added at the end. So a warp
has few instructions for each byte of the weight.

Each row of a product is a sum of its own, in the same order for any number of rows. So a row has the same bits alone
and beside 7 others.

With a dependent launch (dependent_launch.py) a program prefetches the beginning of its part of the weight while
the kernel before it still runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .dependent_launch import begin_dependent, launch_options, prefetch_lines
from .primitives import dot, has_dense_rows, is_interpreted
from .tuning import LESS_SHARED_MEMORY, arch_of, cdiv, next_power_of_2

MAX_ROWS = 8
_LINES = 16
"""Cache lines of each row of the weight that a dependent launch prefetches: 32 to 128 KB for each program."""
_LINE_BYTES = 128


class Norm(NamedTuple):
    """The RMSNorm before a linear layer."""

    weight: torch.Tensor
    """[in]"""
    eps: float


class _Tile(NamedTuple):
    block_n: int
    block_k: int
    slices: int
    """slices of a block of inputs, one for each warp"""
    num_stages: int


_TILES = {
    torch.bfloat16: (_Tile(16, 256, 4, 6), _Tile(32, 256, 4, 5)),
    torch.float32: (_Tile(16, 64, 4, 2), _Tile(16, 64, 4, 2)),
}
"""By the type of x: without a norm, and with one. For bfloat16, the fastest on an H200 (docs/log.md)."""
_FEWER_STAGES = 3
"""Most stages of a layer with a gate on GPUs with less shared memory, which then holds two blocks of 36 KB."""


@triton.jit
def _load_weight(at, in_k, FULL: tl.constexpr):
    """A block of the weight, [SLICES, BLOCK_N, inputs of a slice]. FULL: all blocks are full, so no mask is needed."""
    if FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=in_k[:, None, :], other=0.0)


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _skinny_linear_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, N: tl.constexpr,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr, WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = row < num_rows, column < N
    # Columns beyond the last one read the last one's weights. Their results are not stored.
    weights = weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K
    if DEPENDENT:
        ahead = weights[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, K - 1)[None, :]
        prefetch_lines(ahead)
        if GATED:
            prefetch_lines(ahead + N * K)
        begin_dependent()
    WIDTH: tl.constexpr = BLOCK_K // SLICES
    inputs = (tl.arange(0, SLICES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([SLICES, BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([SLICES, WIDTH, ROWS], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inputs
        in_k = k < K
        at = weights[None, :, None] + k[:, None, :]
        in_x = in_rows[None, None, :] & in_k[:, :, None]
        x = tl.load(x_ptr + (row * stride_x)[None, None, :] + k[:, :, None], mask=in_x, other=0.0)
        weight = _load_weight(at, in_k, K % BLOCK_K == 0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + k, mask=in_k, other=0.0).to(tl.float32)[:, :, None]).to(x.dtype)
        total = dot(weight, x, total, WIDEN)
        if GATED:
            up = _load_weight(at + N * K, in_k, K % BLOCK_K == 0)
            total_up = dot(up, x, total_up, WIDEN)
    out = tl.sum(total, axis=0)
    out_up = tl.sum(total_up, axis=0)
    if NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=0), axis=0) / K + eps)[None, :]
        out *= scale
        out_up *= scale
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
        if GATED:
            out_up += tl.load(bias_ptr + N + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    if GATED:
        out = out / (1.0 + tl.exp(-out)) * out_up
    place = row[None, :] * N + column[:, None]
    inside = in_rows[None, :] & in_columns[:, None]
    if ADD:
        out += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        # The result replaces the residual. Several threads may load a number that one of them stores.
        tl.debug_barrier()
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """Compute rms_norm(x) @ weight.T + bias in float32, then an epilogue: [T, in] -> [T, out].

    Args:
        x: [T, in], T <= MAX_ROWS, last dimension contiguous, bfloat16 or float32. Not float16, which may not hold a
            product of x and the norm's weight before it is scaled
        weight: [out, in], contiguous, of x's dtype; with `gated` [2 * out, in], the gate's rows first
        bias: [len(weight)]
        norm: the norm; None: x is multiplied as it is
        gated: whether the result is silu(first half) * second half
        residual: [T, out], contiguous. The result is added to it in place, and it is returned
        out: [T, out], contiguous, of any float type, without `residual`: where to write the result, which is returned
        dependent: whether the launch is dependent (dependent_launch.py)
    """
    num_rows, num_in = x.shape
    num_out = len(weight) // 2 if gated else len(weight)
    assert num_rows <= MAX_ROWS and x.dtype in _TILES and has_dense_rows(x)
    assert weight.shape[1] == num_in and weight.dtype == x.dtype and weight.is_contiguous()
    assert residual is None or (residual.shape == (num_rows, num_out) and residual.is_contiguous())
    assert out is None or (residual is None and out.shape == (num_rows, num_out) and out.is_contiguous())
    if out is None:
        out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device) if residual is None else residual
    if num_rows:
        tile = _TILES[x.dtype][norm is not None]
        if gated and arch_of(x.device) in LESS_SHARED_MEMORY:
            tile = tile._replace(num_stages=min(tile.num_stages, _FEWER_STAGES))
        _skinny_linear_kernel[(cdiv(num_out, tile.block_n),)](
            x, weight if norm is None else norm.weight, weight, weight if bias is None else bias, out, out,
            x.stride(0), num_rows, 0.0 if norm is None else norm.eps, N=num_out, K=num_in, NORM=norm is not None,
            GATED=gated, ADD=residual is not None, HAS_BIAS=bias is not None, ROWS=MAX_ROWS, BLOCK_N=tile.block_n,
            BLOCK_K=min(tile.block_k, max(tile.slices * 16, next_power_of_2(num_in))), SLICES=tile.slices,
            WIDEN=is_interpreted(_skinny_linear_kernel) and x.dtype == torch.bfloat16, DEPENDENT=dependent,
            LINES=_LINES, LINE=_LINE_BYTES // x.itemsize, num_warps=tile.slices, num_stages=tile.num_stages,
            **launch_options(dependent=dependent),
        )  # fmt: skip
    return out


def skinny_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`skinny_linear` in plain torch, without a rounding before the end."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    result = wide @ weight.to(wide.dtype).T
    if bias is not None:
        result += bias
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = torch.nn.functional.silu(gate) * up
    if out is not None:
        return out.copy_(result)
    return result.to(x.dtype) if residual is None else residual.copy_(residual.to(result.dtype) + result)
