"""Partial softmaxes of extend attention: how a split's is stored, merged with those before it, and made the result."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import sink_weight


@triton.jit
def store_part(
    part_top_ptr, part_total_ptr, part_o_ptr, part, top, total, acc, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Store a partial softmax as number `part`. It has the shape of a query tile: few registers hold its addresses."""
    row = part * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(part_top_ptr + row, top)
    tl.store(part_total_ptr + row, total)
    tl.store(part_o_ptr + row[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], acc)


@triton.jit
def load_part(part_top_ptr, part_total_ptr, part_o_ptr, row, BLOCK_D: tl.constexpr):
    """The partial softmax of some rows. row: number of the part * BLOCK_M + row of the query tile."""
    acc = tl.load(part_o_ptr + row[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])
    return tl.load(part_top_ptr + row), tl.load(part_total_ptr + row), acc


@triton.jit
def merge(top, total, acc, next_top, next_total, next_acc):
    """The partial softmax of the splits so far and of the next one. Explicit fma: two kernels need the same bits."""
    new_top = tl.maximum(top, next_top)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    old, new = tl.exp2(top - pivot), tl.exp2(next_top - pivot)
    total = tl.fma(total, old, next_total * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), next_acc * new[:, None])
    return new_top, total, acc


@triton.jit
def store_out(
    out_ptr, extend_start_ptr, pair, kv_head, top, total, acc, v_scale, sinks_ptr,
    HAS_SINKS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the result of some rows of a query tile. pair: their numbers in the request."""
    q_start = tl.load(extend_start_ptr)
    token = q_start.to(tl.int64) + pair // GROUP
    offs_d = tl.arange(0, BLOCK_D)
    line = token * NUM_HEADS + kv_head * GROUP + pair % GROUP
    mask = (token < tl.load(extend_start_ptr + 1))[:, None] & (offs_d < HEAD_DIM)[None, :]
    if HAS_SINKS:
        total += sink_weight(tl.load(sinks_ptr + kv_head * GROUP + pair % GROUP), top)
    # With a window, rows beyond the request's last token have no position. They are not stored.
    out = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + line[:, None] * HEAD_DIM + offs_d[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def merge_in_turn(
    part_top_ptr, part_total_ptr, part_o_ptr, part, split, first, last, top, total, acc,
    out_ptr, extend_start_ptr, tile, kv_head, v_scale, sinks_ptr,
    HAS_SINKS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge a split's partial softmax with those of the splits before it, which `part` keeps in memory. After the last
    split, store the result of the query tile.
    """
    # Two parts: the merged splits and the last one. A few rows are merged at a time, for want of registers.
    slot = 2 * part + tl.where(split > first, 1, 0)
    store_part(part_top_ptr, part_total_ptr, part_o_ptr, slot, top, total, acc, BLOCK_M, BLOCK_D)
    tl.debug_barrier()
    for i in range(0, BLOCK_M, ROWS):
        row = 2 * part * BLOCK_M + i + tl.arange(0, ROWS)
        merged_top, merged_total, merged = load_part(
            part_top_ptr, part_total_ptr, part_o_ptr, row, BLOCK_D
        )  # fmt: skip
        if split > first:
            next_top, next_total, next_acc = load_part(
                part_top_ptr, part_total_ptr, part_o_ptr, row + BLOCK_M, BLOCK_D
            )  # fmt: skip
            merged_top, merged_total, merged = merge(
                merged_top, merged_total, merged, next_top, next_total, next_acc
            )  # fmt: skip
            # Several warps may load a row's maximum and sum. All must have them before one stores.
            tl.debug_barrier()
            tl.store(part_top_ptr + row, merged_top)
            tl.store(part_total_ptr + row, merged_total)
            tl.store(part_o_ptr + row[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :], merged)
        if split == last:
            store_out(
                out_ptr, extend_start_ptr, tile * BLOCK_M + i + tl.arange(0, ROWS), kv_head,
                merged_top, merged_total, merged, v_scale, sinks_ptr,
                HAS_SINKS, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
    tl.debug_barrier()
