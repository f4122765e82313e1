"""Linear layers of at most 8 rows, with the norm before them and the residual sum or the gated activation after them.

A product of so few rows takes as long as reading its weight. So what lies between two products should cost no launch,
and little time of its own: one kernel computes

    out = epilogue(rms_norm(x) @ weight.T + bias)

A program has BLOCK_N outputs of all rows, and reads its part of the weight once, in order. The weight does not wait for
the norm: rms_norm(x) = x * norm_weight * scale, with one scale for each row, so the product is scaled at its end. A
layer before a sum prepares the norm after it: each of its programs multiplies its part of the sum by the norm's weight,
and adds up its squares (`ScaledRows`). Otherwise all programs of the next layer would do this for whole rows.

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
from .dependent_launch import launch_options, let_next_start, prefetch_lines, wait_for_previous
from .primitives import dot, has_dense_rows, is_interpreted
from .scaled_rows import ScaledRows
from .tuning import arch_of, cdiv, next_power_of_2

MAX_ROWS = 8
_LINE_BYTES = 128
"""Bytes of a line of the L2 cache. A dependent launch prefetches the lines of its first block."""
_NO_NORM, _OWN_NORM, _SCALED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What x is: multiplied as it is; rows before a norm; rows of ScaledRows."""


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
    torch.bfloat16: (_Tile(16, 512, 4, 4), _Tile(16, 512, 4, 2)),
    torch.float32: (_Tile(16, 64, 4, 2), _Tile(16, 64, 4, 2)),
}
"""By the type of x: without a gate, and with one. For bfloat16, near the fastest of each layer on an H200
(docs/log.md): three programs of a multiprocessor fit, or five with a gate, so that some read while others add up."""
_LESS_BLOCK_K = 256
"""Most inputs of a block where 512 would take too many registers: of rows before a norm, with their squares, and on
AMD."""


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
    x_ptr, norm_ptr, squares_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, next_norm_ptr, scaled_ptr,
    next_squares_ptr, stride_x, num_rows, eps, N: tl.constexpr, K: tl.constexpr, X_KIND: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_PARTS: tl.constexpr, SLICES: tl.constexpr, WIDEN: tl.constexpr,
    DEPENDENT: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    column = program * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = row < num_rows, column < N
    # Columns beyond the last one read the last one's weights. Their results are not stored.
    weights = weight_ptr + tl.minimum(column, N - 1).to(tl.int64) * K
    if DEPENDENT:
        ahead = weights[:, None] + tl.minimum(tl.arange(0, LINES) * LINE, K - 1)[None, :]
        prefetch_lines(ahead)
        if GATED:
            prefetch_lines(ahead + N * K)
        wait_for_previous()
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
        if X_KIND == _OWN_NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * tl.load(norm_ptr + k, mask=in_k, other=0.0).to(tl.float32)[:, :, None]).to(x.dtype)
        total = dot(weight, x, total, WIDEN)
        if GATED:
            up = _load_weight(at + N * K, in_k, K % BLOCK_K == 0)
            total_up = dot(up, x, total_up, WIDEN)
    if DEPENDENT:
        let_next_start()
    out = tl.sum(total, axis=0)
    out_up = tl.sum(total_up, axis=0)
    if X_KIND != _NO_NORM:
        if X_KIND == _OWN_NORM:
            sum_of_squares = tl.sum(tl.sum(squares, axis=0), axis=0)
        else:
            part = tl.arange(0, BLOCK_PARTS)[:, None]
            sums = tl.load(squares_ptr + part * ROWS + row[None, :], mask=part < PARTS, other=0.0)
            sum_of_squares = tl.sum(sums, axis=0)
        scale = tl.rsqrt(sum_of_squares / K + eps)[None, :]
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
        # The sum replaces the residual. Several threads may load a number that one of them stores.
        tl.debug_barrier()
        # The norm after it is that of the stored sum.
        out = out.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, out, mask=inside)
        wide = out.to(tl.float32)
        next_norm = tl.load(next_norm_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * next_norm[:, None]).to(scaled_ptr.dtype.element_ty), mask=inside)
        own = tl.sum(tl.where(inside, wide * wide, 0.0), axis=0)
        tl.store(next_squares_ptr + program * ROWS + row, own)
    else:
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def skinny_linear(
    x: torch.Tensor | ScaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """Compute rms_norm(x) @ weight.T + bias in float32, then an activation: [T, in] -> [T, out].

    Args:
        x: [T, in], T <= MAX_ROWS, last dimension contiguous, bfloat16 or float32. Not float16, which may not hold a
            product of x and the norm's weight before it is scaled. ScaledRows have been multiplied by it
        weight: [out, in], contiguous, of x's dtype; with `gated` [2 * out, in], the gate's rows first
        bias: [len(weight)]
        norm: the norm, which ScaledRows need; None: x is multiplied as it is
        gated: whether the result is silu(first half) * second half
        out: [T, out], contiguous, of any float type: where to write the result, which is returned
        dependent: whether the launch is dependent (dependent_launch.py)
    """
    rows = x.x if isinstance(x, ScaledRows) else x
    shape = len(rows), len(weight) // 2 if gated else len(weight)
    assert out is None or (out.shape == shape and out.is_contiguous())
    if out is None:
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    _launch(x, weight, bias, out, norm=norm, gated=gated, dependent=dependent)
    return out


def skinny_linear_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    next_norm: torch.Tensor,
    *,
    dependent: bool = False,
) -> ScaledRows:
    """Add x @ weight.T + bias to the residual in place, and prepare the norm of the sum.

    residual: [T, out], contiguous, of x's dtype. next_norm: [out], the norm's weight. Other arguments as in
    `skinny_linear`.
    """
    assert residual.shape == (len(x), len(weight)) and residual.is_contiguous() and residual.dtype == x.dtype
    assert next_norm.shape == (len(weight),) and next_norm.is_contiguous()
    squares = torch.empty(
        (cdiv(len(weight), _TILES[x.dtype][0].block_n), MAX_ROWS), dtype=torch.float32, device=x.device
    )
    scaled = ScaledRows(torch.empty_like(residual), squares)
    _launch(x, weight, bias, residual, next_norm=next_norm, scaled=scaled, dependent=dependent)
    return scaled


def _launch(
    x: torch.Tensor | ScaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    next_norm: torch.Tensor | None = None,
    scaled: ScaledRows | None = None,
    dependent: bool,
) -> None:
    """Launch the kernel. `scaled`: where to write the rows for `next_norm`; `out` is the residual then."""
    squares = None
    if isinstance(x, ScaledRows):
        x, squares = x
        assert norm is not None and squares.shape[1] == MAX_ROWS and squares.is_contiguous()
    num_rows, num_in = x.shape
    num_out = out.shape[1]
    assert num_rows <= MAX_ROWS and x.dtype in _TILES and has_dense_rows(x)
    assert weight.shape[1] == num_in and weight.dtype == x.dtype and weight.is_contiguous()
    if not num_rows:
        return
    tile = _TILES[x.dtype][gated]
    line = _LINE_BYTES // x.itemsize
    parts = 1 if squares is None else len(squares)
    kind = _NO_NORM if norm is None else _OWN_NORM if squares is None else _SCALED
    most = _LESS_BLOCK_K if kind is _OWN_NORM or arch_of(x.device).startswith("gfx") else tile.block_k
    block_k = min(tile.block_k, most, max(tile.slices * 16, next_power_of_2(num_in)))
    _skinny_linear_kernel[(cdiv(num_out, tile.block_n),)](
        x, weight if norm is None else norm.weight, out if squares is None else squares, weight,
        weight if bias is None else bias, out, out, weight if next_norm is None else next_norm,
        out if scaled is None else scaled.x, out if scaled is None else scaled.squares, x.stride(0), num_rows,
        0.0 if norm is None else norm.eps, N=num_out, K=num_in, X_KIND=kind.value, PARTS=parts, GATED=gated,
        ADD=scaled is not None, HAS_BIAS=bias is not None, ROWS=MAX_ROWS, BLOCK_N=tile.block_n, BLOCK_K=block_k,
        BLOCK_PARTS=next_power_of_2(parts), SLICES=tile.slices,
        WIDEN=is_interpreted(_skinny_linear_kernel) and x.dtype == torch.bfloat16, DEPENDENT=dependent,
        LINES=cdiv(block_k, line), LINE=line, num_warps=tile.slices, num_stages=tile.num_stages,
        **launch_options(dependent=dependent),
    )  # fmt: skip


def skinny_linear_ref(
    x: torch.Tensor | ScaledRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`skinny_linear` in plain torch, without a rounding before the end."""
    rows, squares = x if isinstance(x, ScaledRows) else (x, None)
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if norm is not None:
        mean = wide.square().mean(-1) if squares is None else squares.sum(0)[: len(rows)] / rows.shape[1]
        wide = wide * torch.rsqrt(mean + norm.eps)[:, None] * (norm.weight if squares is None else 1)
    result = wide @ weight.to(wide.dtype).T
    if bias is not None:
        result += bias
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = torch.nn.functional.silu(gate) * up
    return result.to(rows.dtype) if out is None else out.copy_(result)


def skinny_linear_sum_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, next_norm: torch.Tensor
) -> ScaledRows:
    """`skinny_linear_sum` in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    result = wide @ weight.to(wide.dtype).T + residual
    residual.copy_(result if bias is None else result + bias)
    stored = residual.to(wide.dtype)
    squares = torch.zeros(1, MAX_ROWS, dtype=wide.dtype, device=x.device)
    squares[0, : len(x)] = stored.square().sum(-1)
    return ScaledRows((stored * next_norm).to(x.dtype), squares)
