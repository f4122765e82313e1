"""Linear layers with fp8 weights: activations are rounded to fp8 too, and matrix units multiply the two.

    out = (x8 * x_scales) @ (weight8 * weight_scales).T + bias

`quantize_rows` rounds activations in groups of FP8_BLOCK numbers of a row, each with a scale of its own. The product
goes through a row in the same groups, from the first to the last: the product of each group is a sum of its own in
fp32, which is scaled and then added to the total. Sums of so few numbers also keep the error of sm_90 small, whose
matrix units add fp8 products with fewer bits than fp32 has.

A row has the same bits in every batch. The number of rows decides only the height of a tile, 64 or 128. Its width and
its instruction stay, and in the tile of 128 rows, each of two groups of warps does what the tile of 64 rows does. So
one row takes as many products as 64. They cost no time: few rows take as long as reading the weight.

Devices without matrix units for e4m3fn multiply the same numbers in fp16, which holds all of them.
The kernels have passed their tests on an H200. Their speed has not been measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .fp8_layout import FP8_BLOCK, FP8_LOW_TILE, FP8_MAX
from .primitives import (
    KV_FP8_NATIVE,
    KV_FP8_SOFT,
    as_kernel_operand,
    decode_kv,
    encode_e4m3,
    has_dense_rows,
    kv_format,
)
from .tuning import arch_of, cdiv

_HIGH_TILE = 128
"""Rows of the larger tile."""
_NARROW, _WIDE = 64, 128
_WIDE_FROM = 8192
"""Outputs from which tiles are wide. Narrower layers need narrow tiles to keep enough multiprocessors reading."""
_PIPELINE_BYTES = 96 << 10
"""Shared memory for tiles in flight: less than a block may have on sm_89, and less than half of what sm_90 has."""
_GROUPS = 8
"""Groups of a row that one program rounds."""


class RoundedRows(NamedTuple):
    """Activations in fp8."""

    values: torch.Tensor
    """float8_e4m3fn [T, in]"""
    scales: torch.Tensor
    """float32 [ceil(in / FP8_BLOCK), T]"""


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    x_ptr, out_ptr, scales_ptr, stride_x, num_rows, K: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    MAX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), MAX + tl.zeros([GROUPS], tl.float32))
    scale = tl.where(scale > 0.0, scale, 1.0)
    rounded = encode_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    tl.store(out_ptr + row * K + k, rounded, mask=k < K)
    tl.store(scales_ptr + group * num_rows.to(tl.int64) + row, scale, mask=group * BLOCK < K)


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _fp8_linear_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, num_rows, N: tl.constexpr, K: tl.constexpr,
    BY_BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Programs of the same columns run together, so they share the weight in the cache.
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = row < num_rows, column < N
    rows = x_ptr + row.to(tl.int64)[:, None] * K
    weights = weight_ptr + column.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, tl.cdiv(K, BLOCK)):
        k = block * BLOCK + tl.arange(0, BLOCK)
        row_mask, weight_mask = in_rows[:, None], in_columns[:, None]
        if K % BLOCK:
            row_mask, weight_mask = row_mask & (k < K)[None, :], weight_mask & (k < K)[None, :]
        x = tl.load(rows + k[None, :], mask=row_mask, other=0.0)
        weight = tl.load(weights + k[None, :], mask=weight_mask, other=0.0)
        if FORMAT == 2:
            x, weight = decode_kv(x, FORMAT, tl.float16), decode_kv(weight, FORMAT, tl.float16)
        product = tl.dot(x, tl.trans(weight), out_dtype=tl.float32)
        x_scale = tl.load(x_scales_ptr + block * num_rows.to(tl.int64) + row, mask=in_rows, other=0.0)
        product *= x_scale[:, None]
        if BY_BLOCK:
            product *= tl.load(scales_ptr + block * N + column, mask=in_columns, other=0.0)[None, :]
        total += product
    if not BY_BLOCK:
        total *= tl.load(scales_ptr + column, mask=in_columns, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


def quantize_rows(x: torch.Tensor) -> RoundedRows:
    """Round activations to fp8: x [T, in] of any floating dtype, last dimension contiguous.

    The largest magnitude of a group becomes FP8_MAX. A group of zeros has the scale 1; NaN stays NaN.
    """
    assert has_dense_rows(x)
    num_rows, num_in = x.shape
    num_groups = cdiv(num_in, FP8_BLOCK)
    values = torch.empty((num_rows, num_in), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    if num_rows:
        _quantize_rows_kernel[(num_rows, cdiv(num_groups, _GROUPS))](
            x, values, scales, x.stride(0), num_rows, K=num_in, BLOCK=FP8_BLOCK, GROUPS=_GROUPS, MAX=FP8_MAX,
            num_warps=4,
        )  # fmt: skip
    return RoundedRows(values.view(torch.float8_e4m3fn), scales)


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute x @ (values * scales).T + bias with x rounded by `quantize_rows`: [T, in] -> [T, out] of x's dtype.

    Args:
        x: [T, in], last dimension contiguous
        values: float8_e4m3fn [out, in], contiguous
        scales: float32 [1, out], or [ceil(in / FP8_BLOCK), out], contiguous
        bias: [out]
    """
    num_rows, (num_out, num_in) = len(x), values.shape
    assert x.shape[1] == num_in and values.dtype == torch.float8_e4m3fn and values.is_contiguous()
    assert scales.shape[1] == num_out and scales.is_contiguous()
    by_block = scales.shape[0] > 1
    out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    rounded = quantize_rows(x)
    # A kernel for native products reads fp8, so that tiles go to the matrix units as they are.
    arch = arch_of(x.device)
    is_native = kv_format(torch.float8_e4m3fn, arch) == KV_FP8_NATIVE.value
    operands = [rounded.values, values] if is_native else [as_kernel_operand(t) for t in (rounded.values, values)]
    height = FP8_LOW_TILE if num_rows <= FP8_LOW_TILE else _HIGH_TILE
    width = _WIDE if num_out >= _WIDE_FROM and is_native else _NARROW  # wide tiles of fp16 spill registers
    _fp8_linear_kernel[(cdiv(num_rows, height), cdiv(num_out, width))](
        operands[0], rounded.scales, operands[1], scales, scales if bias is None else bias, out, num_rows,
        N=num_out, K=num_in, BY_BLOCK=by_block, HAS_BIAS=bias is not None,
        FORMAT=KV_FP8_NATIVE.value if is_native else KV_FP8_SOFT.value, BLOCK_M=height, BLOCK_N=width,
        BLOCK=FP8_BLOCK, num_warps=4 if height == FP8_LOW_TILE else 8,
        num_stages=_PIPELINE_BYTES // ((height + width) * FP8_BLOCK) if is_native else 2,
    )  # fmt: skip
    return out


def quantize_rows_ref(x: torch.Tensor) -> RoundedRows:
    """`quantize_rows` in plain torch, with the same bits."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
    most = groups.abs().amax(2)
    scales = most / torch.full_like(most, FP8_MAX)  # on a GPU, torch divides by a number with two roundings
    scales = torch.where(scales > 0, scales, 1)
    rounded = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return RoundedRows(rounded.flatten(1)[:, : x.shape[1]].contiguous(), scales.t().contiguous())


def fp8_linear_ref(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`fp8_linear` in plain torch, in float64."""

    def widened(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        by_number = scales if len(scales) == 1 else scales.repeat_interleave(FP8_BLOCK, 0)[: values.shape[1]]
        return values.double() * by_number.t().double()

    out = widened(*quantize_rows_ref(x)) @ widened(values, scales).t()
    return (out if bias is None else out + bias.double()).to(x.dtype)
