"""The work unit of decode attention: the queries of a KV head attend to one split of the KV of a request.

Both `_decode_split_kernel` and `_fused_decode_kernel` consist of these functions, so they compute the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import decode_kv, decode_kv_pairs, dot, tanh


@triton.jit
def split_bounds(split, seq_len, window, HAS_WINDOW: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The positions of a request's split, and the first position that is attended to: lo, hi, first.

    A split that ends before the window has lo >= hi. It has no partial result, and merging skips it.
    """
    lo = split * SPLIT
    hi = tl.minimum(lo + SPLIT, seq_len)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0)
        lo = tl.maximum(lo, first // BLOCK_N * BLOCK_N)
    return lo, hi, first


@triton.jit
def load_unit(records_ptr, unit):
    """What the work map says of a unit: its request, the request's length, first unit, and row of the table."""
    record_ptr = records_ptr + unit * 4
    return tl.load(record_ptr), tl.load(record_ptr + 1), tl.load(record_ptr + 2), tl.load(record_ptr + 3)


@triton.jit
def attend_to_split(
    q, k_head_ptr, v_head_ptr, row_ptr, lo, hi, first, stride_slot, scale, cap_scale, HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, KV_FORMAT: tl.constexpr, IN_PAIRS: tl.constexpr,
    WIDEN: tl.constexpr, PAGED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax of the query heads q, [BLOCK_H, BLOCK_D], over positions lo to hi, in tiles. lo < hi.

    Returns the largest scaled score and the sum of weights of each head, and the weighted sum of values.
    IN_PAIRS: read two bytes of KV as one element. Even and odd components are two tensors, with products of their own.
    PAGED: a tile has consecutive slots, because lo is a multiple of BLOCK_N, and so is the page size.
    """
    tl.static_assert(not (PAGED and IN_PAIRS), "pairs are read with a look-up for each slot")
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    compute: tl.constexpr = q.dtype
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if IN_PAIRS:
        q_even, q_odd = tl.split(tl.reshape(q, [BLOCK_H, BLOCK_D // 2, 2]))
        k_pair_ptr = k_head_ptr.to(tl.pointer_type(tl.uint16))
        v_pair_ptr = v_head_ptr.to(tl.pointer_type(tl.uint16))
        offs_pair = tl.arange(0, BLOCK_D // 2)
        inside = offs_pair < HEAD_DIM // 2
        even_acc = tl.zeros([BLOCK_H, BLOCK_D // 2], tl.float32)
        odd_acc = even_acc
    else:
        offs_d = tl.arange(0, BLOCK_D)
        inside = offs_d < HEAD_DIM
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if PAGED:
        slot = tl.load(row_ptr + lo).to(tl.int64)
    for start in range(lo, hi, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        valid = position < hi
        if PAGED:
            # The look-up for the next tile is a tile ahead, so that its K and V do not wait for it.
            k_tile_ptr = k_head_ptr + slot * stride_slot
            v_tile_ptr = v_head_ptr + slot * stride_slot
            slot = tl.load(row_ptr + tl.minimum(start + BLOCK_N, hi - 1)).to(tl.int64)
            slots = tl.arange(0, BLOCK_N)
        else:
            k_tile_ptr, v_tile_ptr = k_head_ptr, v_head_ptr
            slots = tl.load(row_ptr + position, mask=valid, other=0).to(tl.int64)
        zero = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        if IN_PAIRS:
            pairs = tl.load(
                k_pair_ptr + slots[None, :] * (stride_slot // 2) + offs_pair[:, None],
                mask=valid[None, :] & inside[:, None],
                other=0,
            )
            even, odd = decode_kv_pairs(pairs, KV_FORMAT, compute)
            scores = dot(q_odd, odd, dot(q_even, even, zero, WIDEN), WIDEN)
        else:
            k = tl.load(
                k_tile_ptr + slots[None, :] * stride_slot + offs_d[:, None],
                mask=valid[None, :] & inside[:, None],
                other=0.0,
            )
            scores = dot(q, decode_kv(k, KV_FORMAT, compute), zero, WIDEN)
        if HAS_CAP:
            scores = tanh(scores * cap_scale)
        seen = valid & (position >= first) if HAS_WINDOW else valid
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        fade = tl.exp2(top - new_top)
        p = tl.exp2(tl.fma(scores, scale, -new_top[:, None]))
        total = total * fade + tl.sum(p, axis=1)
        if IN_PAIRS:
            pairs = tl.load(
                v_pair_ptr + slots[:, None] * (stride_slot // 2) + offs_pair[None, :],
                mask=valid[:, None] & inside[None, :],
                other=0,
            )
            even, odd = decode_kv_pairs(pairs, KV_FORMAT, compute)
            even_acc = dot(p.to(compute), even, even_acc * fade[:, None], WIDEN)
            odd_acc = dot(p.to(compute), odd, odd_acc * fade[:, None], WIDEN)
        else:
            v = tl.load(
                v_tile_ptr + slots[:, None] * stride_slot + offs_d[None, :],
                mask=valid[:, None] & inside[None, :],
                other=0.0,
            )
            acc = dot(p.to(compute), decode_kv(v, KV_FORMAT, compute), acc * fade[:, None], WIDEN)
        top = new_top
    if IN_PAIRS:
        acc = tl.reshape(tl.join(even_acc, odd_acc), [BLOCK_H, BLOCK_D])
    return top, total, acc


@triton.jit
def store_part(
    o, lse, part_o_ptr, part_lse_ptr, unit, heads, mask_h, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Store the partial result of a unit for merging."""
    offs_d = tl.arange(0, o.shape[1])
    part = (unit * NUM_HEADS + heads).to(tl.int64)
    mask = mask_h[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(part_o_ptr + part[:, None] * HEAD_DIM + offs_d[None, :], o, mask=mask)
    tl.store(part_lse_ptr + part, lse, mask=mask_h)
