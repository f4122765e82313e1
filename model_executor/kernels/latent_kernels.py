"""The kernels of latent attention; latent_attention.py says what they compute, and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .bound import bound
from .decode_split import load_unit
from .extend_kernels import BY_UNIT, IN_TURN, ONE_SPLIT, kv_range
from .extend_parts import merge_in_turn, store_out, store_part
from .primitives import dot


@triton.jit
def _load_queries(
    q_ptr, offsets, inside, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The latent and the rotated components of queries, [rows, BLOCK_L] and [rows, BLOCK_R]. Where not inside: zeros.

    offsets: of the rows from q_ptr, in 32 bits, because registers are scarce.
    """
    row_ptr = q_ptr + offsets[:, None]
    offs_l, offs_r = tl.arange(0, BLOCK_L)[None, :], tl.arange(0, BLOCK_R)[None, :]
    latent = tl.load(row_ptr + offs_l, mask=inside[:, None] & (offs_l < LATENT_DIM), other=0.0)
    rope = tl.load(row_ptr + LATENT_DIM + offs_r, mask=inside[:, None] & (offs_r < ROPE_DIM), other=0.0)
    return latent, rope


@triton.jit
def _attend_split(
    q_latent, q_rope, lo, hi, q_pos, pool_ptr, row_ptr, scale, LATENT_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    WIDEN: tl.constexpr, PAGED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The partial softmax over positions [lo, hi), up to q_pos of each row: maximum, sum and weighted values.

    The latent components of a KV tile are read once: they are a part of the keys, and the values.
    """
    BLOCK_M: tl.constexpr = q_latent.shape[0]
    BLOCK_L: tl.constexpr = q_latent.shape[1]
    BLOCK_R: tl.constexpr = q_rope.shape[1]
    HEAD_DIM: tl.constexpr = LATENT_DIM + ROPE_DIM
    offs_l, offs_r = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    if PAGED:
        slot = tl.load(row_ptr + lo).to(tl.int64)
    for start in range(lo, hi, BLOCK_N):
        in_tile = tl.arange(0, BLOCK_N)
        # Beyond the last position, that one is read again. So loads need no masks, which take registers, and read no
        # NaN of an unused slot.
        inside = tl.minimum(in_tile, hi - 1 - start)
        if PAGED:
            tile_ptr = pool_ptr + slot * HEAD_DIM
            offsets = inside * HEAD_DIM
            # The look-up for the next tile is a tile ahead, so that its KV does not wait for it.
            slot = tl.load(row_ptr + tl.minimum(start + BLOCK_N, hi - 1)).to(tl.int64)
        else:
            tile_ptr = pool_ptr
            offsets = tl.load(row_ptr + start + inside).to(tl.int64) * HEAD_DIM
        latent_ptr = tile_ptr + (offsets[:, None] + offs_l[None, :])
        rope_ptr = tile_ptr + (offsets[None, :] + (LATENT_DIM + offs_r)[:, None])
        if LATENT_DIM == BLOCK_L:
            latent = tl.load(latent_ptr)
        else:
            latent = tl.load(latent_ptr, mask=(offs_l < LATENT_DIM)[None, :], other=0.0)
        if ROPE_DIM == BLOCK_R:
            rope = tl.load(rope_ptr)
        else:
            rope = tl.load(rope_ptr, mask=(offs_r < ROPE_DIM)[:, None], other=0.0)
        scores = dot(q_rope, rope, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDEN)
        scores = dot(q_latent, tl.trans(latent), scores, WIDEN)
        scores = tl.where(start + in_tile[None, :] <= q_pos[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        # Where a split has no position for a query, no score is finite: avoid exp2(-inf - -inf), which is NaN.
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp2(top - pivot)
        p = tl.exp2(tl.fma(scores, scale, -pivot[:, None]))
        total = total * fade + tl.sum(p, axis=1)
        acc = dot(p.to(q_latent.dtype), latent, acc * fade[:, None], WIDEN)
        top = new_top
    return top, total, acc


# The batch size and the alignment of these buffers vary from step to step. Specialising on them would compile kernels
# while serving.
_OF_DECODE = ["q_loc_ptr", "work_starts_ptr", "records_ptr"]
_OF_EXTEND = ["rows_ptr", "extend_start_ptr", "prefix_lens_ptr", "work_starts_ptr", "work_rows_ptr"]


@bound
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_OF_DECODE)
def latent_decode_kernel(
    q_ptr,
    pool_ptr,
    table_ptr,
    q_loc_ptr,
    work_starts_ptr,
    records_ptr,
    part_o_ptr,
    part_lse_ptr,
    batch,
    stride_qt,
    stride_qh,
    stride_table,
    scale,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    HAS_Q_LOC: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    first_head = tl.program_id(0) * BLOCK_H
    num_units = tl.load(work_starts_ptr + batch)
    for unit in range(tl.program_id(1), num_units, tl.num_programs(1)):
        b, seq_len, begin, row = load_unit(records_ptr, unit)
        lo = (unit - begin) * SPLIT
        hi = tl.minimum(lo + SPLIT, seq_len)
        if lo < hi:
            # Both depend on a length, although they do not change with it. Otherwise the compiler would compute the
            # addresses of queries and of outputs before these loops, where registers are scarce.
            to_load = tl.arange(0, BLOCK_H) + tl.minimum(seq_len, 0)
            to_store = tl.arange(0, BLOCK_H) + tl.minimum(hi, 0)
            token = tl.load(q_loc_ptr + b).to(tl.int64) if HAS_Q_LOC else b.to(tl.int64)
            q_latent, q_rope = _load_queries(
                q_ptr + token * stride_qt + first_head * stride_qh, to_load * stride_qh,
                to_load < NUM_HEADS - first_head, LATENT_DIM, ROPE_DIM, BLOCK_L, BLOCK_R,
            )  # fmt: skip
            q_pos = tl.zeros([BLOCK_H], tl.int32) + (hi - 1)
            top, total, acc = _attend_split(
                q_latent, q_rope, lo, hi, q_pos, pool_ptr, table_ptr + row.to(tl.int64) * stride_table, scale,
                LATENT_DIM, ROPE_DIM, WIDEN, PAGED, BLOCK_N,
            )  # fmt: skip
            inside = to_store < NUM_HEADS - first_head
            offs_l = tl.arange(0, BLOCK_L)
            part = (unit * NUM_HEADS + first_head).to(tl.int64)
            o_ptr = part_o_ptr + part * LATENT_DIM + to_store[:, None] * LATENT_DIM + offs_l[None, :]
            tl.store(o_ptr, acc / total[:, None], mask=inside[:, None] & (offs_l < LATENT_DIM)[None, :])
            tl.store(part_lse_ptr + part + to_store, top + tl.log2(total), mask=inside)


@bound
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_OF_EXTEND)
def latent_extend_kernel(
    q_ptr,
    pool_ptr,
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
    stride_table,
    scale,
    NUM_HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    unit = tl.program_id(0)
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
    _, _, end = kv_range(tile, prefix, q_len, 0, NUM_HEADS, False, BLOCK_M, BLOCK_N)
    last = (end - 1) // SPLIT
    if SPLITS == BY_UNIT:
        split = in_request % num_splits
        if split > last:
            return

    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // NUM_HEADS
    q_pos = prefix + token
    first_token = tile * BLOCK_M // NUM_HEADS
    q_latent, q_rope = _load_queries(
        q_ptr + (q_start.to(tl.int64) + first_token) * stride_qt,
        (token - first_token) * stride_qt + pair % NUM_HEADS * stride_qh, token < q_len,
        LATENT_DIM, ROPE_DIM, BLOCK_L, BLOCK_R,
    )  # fmt: skip
    row_ptr = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * stride_table
    part = unit.to(tl.int64)
    if SPLITS == ONE_SPLIT:
        top, total, acc = _attend_split(
            q_latent, q_rope, 0, end, q_pos, pool_ptr, row_ptr, scale,
            LATENT_DIM, ROPE_DIM, WIDEN, PAGED, BLOCK_N,
        )  # fmt: skip
        store_out(
            out_ptr, extend_start_ptr + b, pair, 0, top, total, acc, 1.0, out_ptr,
            False, NUM_HEADS, NUM_HEADS, LATENT_DIM, BLOCK_L,
        )  # fmt: skip
    elif SPLITS == IN_TURN:
        for split in range(0, last + 1):
            top, total, acc = _attend_split(
                q_latent, q_rope, split * SPLIT, tl.minimum(end, (split + 1) * SPLIT), q_pos,
                pool_ptr, row_ptr, scale, LATENT_DIM, ROPE_DIM, WIDEN, PAGED, BLOCK_N,
            )  # fmt: skip
            merge_in_turn(
                part_top_ptr, part_total_ptr, part_o_ptr, part, split, 0, last, top, total, acc,
                out_ptr, extend_start_ptr + b, tile, 0, 1.0, out_ptr,
                False, NUM_HEADS, NUM_HEADS, LATENT_DIM, BLOCK_M, BLOCK_L, ROWS,
            )  # fmt: skip
    else:
        top, total, acc = _attend_split(
            q_latent, q_rope, split * SPLIT, tl.minimum(end, (split + 1) * SPLIT), q_pos,
            pool_ptr, row_ptr, scale, LATENT_DIM, ROPE_DIM, WIDEN, PAGED, BLOCK_N,
        )  # fmt: skip
        store_part(part_top_ptr, part_total_ptr, part_o_ptr, part, top, total, acc, BLOCK_M, BLOCK_L)
