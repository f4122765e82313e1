"""The kernels of extend attention; extend_attention.py says what they compute, and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .bound import bound
from .extend_parts import load_part, merge, merge_in_turn, store_out, store_part
from .primitives import as_operand_of, decode_kv, dot, tanh

ONE_SPLIT = tl.constexpr(0)
"""Every request has one split."""
IN_TURN = tl.constexpr(1)
"""A program computes the splits of its query tile in turn. It has two partial results in memory."""
BY_UNIT = tl.constexpr(2)
"""A split is a work unit, with a partial result for each KV head."""


@triton.jit
def _attend(
    q,
    top,
    total,
    acc,
    start,
    slot,
    end,
    q_pos,
    k_head_ptr,
    v_head_ptr,
    row_ptr,
    stride_slot,
    scale,
    cap_scale,
    window,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to the KV tile at positions [start, start + BLOCK_N). Not MASKED: no causal mask, but a window may be.

    slot: if PAGED, the first slot of the tile. Returns also that of the next tile, which is loaded a tile ahead.
    """
    compute: tl.constexpr = q.dtype
    position = start + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    valid = position < end
    if PAGED:
        next_slot = tl.load(row_ptr + tl.minimum(start + BLOCK_N, end - 1))
        k_head_ptr += slot.to(tl.int64) * stride_slot
        v_head_ptr += slot.to(tl.int64) * stride_slot
        slots = tl.arange(0, BLOCK_N)
    else:
        next_slot = slot
        slots = tl.load(row_ptr + position, mask=valid, other=0) if MASKED else tl.load(row_ptr + position)
        slots = slots.to(tl.int64)
    k_offsets = slots[None, :] * stride_slot + offs_d[:, None]
    if MASKED:
        k = tl.load(k_head_ptr + k_offsets, mask=valid[None, :] & mask_d[:, None], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        k = tl.load(k_head_ptr + k_offsets)
    else:
        k = tl.load(k_head_ptr + k_offsets, mask=mask_d[:, None], other=0.0)
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    scores = dot(q, decode_kv(k, KV_FORMAT, compute), zero, WIDEN)
    if HAS_CAP:
        scores = tanh(scores * cap_scale)
    if MASKED:
        scores = tl.where(position[None, :] <= q_pos[:, None], scores, float("-inf"))
    if HAS_WINDOW:
        scores = tl.where(position[None, :] > q_pos[:, None] - window, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    # Where a split has no position for a query, no score is finite: avoid exp2(-inf - -inf), which is NaN.
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED or HAS_WINDOW else new_top
    fade = tl.exp2(top - pivot)
    # An explicit fma: the compiler could otherwise round masked and unmasked tiles differently.
    p = tl.exp2(tl.fma(scores, scale, -pivot[:, None]))
    total = total * fade + tl.sum(p, axis=1)
    v_offsets = slots[:, None] * stride_slot + offs_d[None, :]
    if MASKED:
        v = tl.load(v_head_ptr + v_offsets, mask=valid[:, None] & mask_d[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        v = tl.load(v_head_ptr + v_offsets)
    else:
        v = tl.load(v_head_ptr + v_offsets, mask=mask_d[None, :], other=0.0)
    acc = dot(p.to(compute), decode_kv(v, KV_FORMAT, compute), acc * fade[:, None], WIDEN)
    return next_slot, new_top, total, acc


@triton.jit
def _attend_split(
    q, lo, diagonal, hi, q_pos, k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window,
    ENTER: tl.constexpr,
    HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, KV_FORMAT: tl.constexpr,
    WIDEN: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The partial softmax over positions [lo, hi): maximum, sum and weighted values. No causal mask before diagonal."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slot = tl.load(row_ptr + lo) if PAGED else 0
    unmasked = tl.minimum(tl.maximum(diagonal, lo), hi)
    # Each loop is entered only if it has an iteration. Otherwise ptxas serialises the asynchronous products of Triton
    # 3.6, because the values of a skipped loop join those that are still being computed. ENTER: enter both loops
    # without this condition, where ptxas serialises nothing, for example with a window. There it would only take
    # registers, which the largest heads lack.
    if ENTER or lo < unmasked:
        for start in range(lo, unmasked, BLOCK_N):
            slot, top, total, acc = _attend(
                q, top, total, acc, start, slot, hi, q_pos,
                k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window,
                HEAD_DIM, False, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, PAGED, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    if ENTER or unmasked < hi:
        for start in range(unmasked, hi, BLOCK_N):
            slot, top, total, acc = _attend(
                q, top, total, acc, start, slot, hi, q_pos,
                k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window,
                HEAD_DIM, True, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, PAGED, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    return top, total, acc


@triton.jit
def kv_range(
    tile, prefix, q_len, window,
    GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(begin, diagonal, end): a query tile attends to positions [begin, end), without a causal mask before diagonal."""
    first_token = tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    # The first query of the query tile attends to all KV before `diagonal`, and so do the others.
    diagonal = (prefix + first_token + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(prefix + first_token - window + 1, 0) // BLOCK_N * BLOCK_N
    return begin, diagonal, prefix + last_token + 1


# The batch size and the alignment of these buffers vary from step to step. Specialising on them
# would compile kernels while serving.
_INDICES = ["rows_ptr", "extend_start_ptr", "prefix_lens_ptr", "work_starts_ptr", "work_rows_ptr", "sinks_ptr"]


@bound
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_INDICES)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    extend_start_ptr,
    prefix_lens_ptr,
    work_starts_ptr,
    work_rows_ptr,
    part_top_ptr,
    part_total_ptr,
    part_o_ptr,
    out_ptr,
    batch,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_table,
    scale,
    cap_scale,
    v_scale,
    window,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    unit = tl.program_id(0)
    kv_head = tl.program_id(1)
    if unit >= tl.load(work_starts_ptr + batch):
        return
    b = tl.load(work_rows_ptr + unit)
    q_start = tl.load(extend_start_ptr + b)
    q_len = (tl.load(extend_start_ptr + b + 1) - q_start).to(tl.int32)
    prefix = tl.load(prefix_lens_ptr + b).to(tl.int32)
    if SPLITS == BY_UNIT:
        in_request = unit - tl.load(work_starts_ptr + b)
        num_splits = (prefix + q_len + SPLIT - 1) // SPLIT
        tile = in_request // num_splits
    else:
        # The last query tile of a request attends to the most KV: start it first.
        tile = tl.load(work_starts_ptr + b + 1) - 1 - unit
    begin, diagonal, end = kv_range(tile, prefix, q_len, window, GROUP, HAS_WINDOW, BLOCK_M, BLOCK_N)
    first = begin // SPLIT
    last = (end - 1) // SPLIT
    if SPLITS == BY_UNIT:
        split = in_request % num_splits
        if (split < first) | (split > last):
            return

    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    q_pos = prefix + token
    offs_d = tl.arange(0, BLOCK_D)
    mask = (token < q_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_offsets = (q_start.to(tl.int64) + token[:, None]) * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
    q = as_operand_of(tl.load(q_ptr + q_offsets, mask=mask, other=0.0), KV_FORMAT)
    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    row_ptr = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * stride_table

    part = (unit * (NUM_HEADS // GROUP) + kv_head).to(tl.int64)
    if SPLITS == ONE_SPLIT:
        top, total, acc = _attend_split(
            q, begin, diagonal, end, q_pos,
            k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window, HAS_WINDOW,
            HEAD_DIM, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, PAGED, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        store_out(
            out_ptr, extend_start_ptr + b, pair, kv_head, top, total, acc, v_scale, sinks_ptr,
            HAS_SINKS, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    elif SPLITS == IN_TURN:
        for split in range(first, last + 1):
            top, total, acc = _attend_split(
                q, tl.maximum(begin, split * SPLIT), diagonal, tl.minimum(end, (split + 1) * SPLIT), q_pos,
                k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window, HAS_WINDOW or HAS_CAP,
                HEAD_DIM, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, PAGED, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            merge_in_turn(
                part_top_ptr, part_total_ptr, part_o_ptr, part, split, first, last, top, total, acc,
                out_ptr, extend_start_ptr + b, tile, kv_head, v_scale, sinks_ptr,
                HAS_SINKS, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D, ROWS,
            )  # fmt: skip
    else:
        top, total, acc = _attend_split(
            q, tl.maximum(begin, split * SPLIT), diagonal, tl.minimum(end, (split + 1) * SPLIT), q_pos,
            k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window, HAS_WINDOW,
            HEAD_DIM, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, PAGED, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        store_part(part_top_ptr, part_total_ptr, part_o_ptr, part, top, total, acc, BLOCK_M, BLOCK_D)


@bound
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_INDICES)
def extend_merge_kernel(
    part_top_ptr,
    part_total_ptr,
    part_o_ptr,
    extend_start_ptr,
    prefix_lens_ptr,
    work_starts_ptr,
    work_rows_ptr,
    out_ptr,
    batch,
    v_scale,
    window,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    unit = tl.program_id(0)
    kv_head = tl.program_id(1)
    if unit >= tl.load(work_starts_ptr + batch):
        return
    b = tl.load(work_rows_ptr + unit)
    q_start = tl.load(extend_start_ptr + b)
    q_len = (tl.load(extend_start_ptr + b + 1) - q_start).to(tl.int32)
    prefix = tl.load(prefix_lens_ptr + b).to(tl.int32)
    in_request = unit - tl.load(work_starts_ptr + b)
    num_splits = (prefix + q_len + SPLIT - 1) // SPLIT
    if in_request % num_splits != 0:  # the programs of a query tile's first unit merge all its splits
        return
    tile = in_request // num_splits
    begin, _, end = kv_range(tile, prefix, q_len, window, GROUP, HAS_WINDOW, BLOCK_M, BLOCK_N)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    pair = tile * BLOCK_M + row
    first = begin // SPLIT
    part = ((unit + first) * (NUM_HEADS // GROUP) + kv_head).to(tl.int64)
    top, total, acc = load_part(part_top_ptr, part_total_ptr, part_o_ptr, part * BLOCK_M + row, BLOCK_D)
    for split in tl.range(first + 1, (end - 1) // SPLIT + 1, num_stages=3):
        part = ((unit + split) * (NUM_HEADS // GROUP) + kv_head).to(tl.int64)
        next_top, next_total, next_acc = load_part(
            part_top_ptr, part_total_ptr, part_o_ptr, part * BLOCK_M + row, BLOCK_D
        )  # fmt: skip
        top, total, acc = merge(top, total, acc, next_top, next_total, next_acc)
    store_out(
        out_ptr, extend_start_ptr + b, pair, kv_head, top, total, acc, v_scale, sinks_ptr,
        HAS_SINKS, NUM_HEADS, GROUP, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
