"""The merge of a request's partial results by their log-sum-exps, for decode attention.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import sink_weight

MERGE_CHAINS = 8
"""Partial results that are added at a time. The order of the sums, and so their bits, depend on it."""


@triton.jit
def merge_splits(
    part_o_ptr, part_lse_ptr, begin, end, heads, sinks_ptr, HAS_SINKS: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of units begin to end, for each of `heads`: float32 [heads, BLOCK_D].

    Chain i adds units begin + i, begin + i + CHAINS, and so on. Then chains are added in pairs. A sum of two has one
    order, so neither the number of heads nor the layout of a tile in registers changes the bits. A few units, or all
    with 1 stage, are added in registers. More STAGES: while a round of CHAINS units is added, the next STAGES - 1
    rounds are copied to shared memory. Sinks are added last.
    """
    # From here on, offsets within the partial results of one request suffice.
    lse_ptr = part_lse_ptr + begin.to(tl.int64) * NUM_HEADS + heads
    o_ptr = part_o_ptr + begin.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM
    count = end - begin
    if count <= CHAINS:
        top, total, acc = _merge_few(lse_ptr, o_ptr, count, NUM_HEADS, HEAD_DIM, BLOCK_D, CHAINS)
    elif STAGES == 1:
        top, total, acc = _merge_in_registers(lse_ptr, o_ptr, count, NUM_HEADS, HEAD_DIM, BLOCK_D, CHAINS)
    else:
        top, total, acc = _merge_in_stages(lse_ptr, o_ptr, count, NUM_HEADS, HEAD_DIM, BLOCK_D, CHAINS, STAGES)
    if HAS_SINKS:
        total += sink_weight(tl.load(sinks_ptr + heads)[:, None], top)
    # A padded request without KV has no partial result: its output is zero.
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _load_output(o_ptr, unit, count, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The outputs of one unit, [heads, BLOCK_D]. Beyond count: zeros."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    inside = offs_d < tl.where(unit < count, HEAD_DIM, 0)
    return tl.load(o_ptr + unit * (NUM_HEADS * HEAD_DIM) + offs_d, mask=inside, other=0.0)


@triton.jit
def _load_lse(lse_ptr, unit, count, NUM_HEADS: tl.constexpr):
    """The log-sum-exps of one unit, [heads, 1]. Beyond count: -inf."""
    inside = tl.arange(0, lse_ptr.shape[0]) < tl.where(unit < count, lse_ptr.shape[0], 0)
    return tl.load(lse_ptr + unit * NUM_HEADS, mask=inside, other=float("-inf"))[:, None]


@triton.jit
def _load_8_outputs(o_ptr, first, count, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    o0 = _load_output(o_ptr, first + 0, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o1 = _load_output(o_ptr, first + 1, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o2 = _load_output(o_ptr, first + 2, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o3 = _load_output(o_ptr, first + 3, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o4 = _load_output(o_ptr, first + 4, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o5 = _load_output(o_ptr, first + 5, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o6 = _load_output(o_ptr, first + 6, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    o7 = _load_output(o_ptr, first + 7, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    return o0, o1, o2, o3, o4, o5, o6, o7


@triton.jit
def _load_8_lses(lse_ptr, first, count, NUM_HEADS: tl.constexpr):
    l0 = _load_lse(lse_ptr, first + 0, count, NUM_HEADS)
    l1 = _load_lse(lse_ptr, first + 1, count, NUM_HEADS)
    l2 = _load_lse(lse_ptr, first + 2, count, NUM_HEADS)
    l3 = _load_lse(lse_ptr, first + 3, count, NUM_HEADS)
    l4 = _load_lse(lse_ptr, first + 4, count, NUM_HEADS)
    l5 = _load_lse(lse_ptr, first + 5, count, NUM_HEADS)
    l6 = _load_lse(lse_ptr, first + 6, count, NUM_HEADS)
    l7 = _load_lse(lse_ptr, first + 7, count, NUM_HEADS)
    return l0, l1, l2, l3, l4, l5, l6, l7


@triton.jit
def _weighted(lse, o, top, is_part):
    """The weight and the weighted output of a partial result, with the bits of `_add_part` to zeros."""
    weight = tl.where(is_part, tl.exp2(lse - top), 0.0)
    return weight, tl.fma(tl.broadcast_to(weight, o.shape), o, tl.zeros_like(o))


@triton.jit
def _merge_few(
    lse_ptr, o_ptr, count, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHAINS: tl.constexpr,
):  # fmt: skip
    """Merge at most CHAINS units: the outputs do not wait for the largest log-sum-exp."""
    tl.static_assert(CHAINS == 8)
    o0, o1, o2, o3, o4, o5, o6, o7 = _load_8_outputs(o_ptr, 0, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
    l0, l1, l2, l3, l4, l5, l6, l7 = _load_8_lses(lse_ptr, 0, count, NUM_HEADS)
    top = tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3))
    top = tl.maximum(top, tl.maximum(tl.maximum(l4, l5), tl.maximum(l6, l7)))
    w0, o0 = _weighted(l0, o0, top, count > 0)
    w1, o1 = _weighted(l1, o1, top, count > 1)
    w2, o2 = _weighted(l2, o2, top, count > 2)
    w3, o3 = _weighted(l3, o3, top, count > 3)
    w4, o4 = _weighted(l4, o4, top, count > 4)
    w5, o5 = _weighted(l5, o5, top, count > 5)
    w6, o6 = _weighted(l6, o6, top, count > 6)
    w7, o7 = _weighted(l7, o7, top, count > 7)
    return top, _sum_of_8(w0, w1, w2, w3, w4, w5, w6, w7), _sum_of_8(o0, o1, o2, o3, o4, o5, o6, o7)


@triton.jit
def _sum_of_8(x0, x1, x2, x3, x4, x5, x6, x7):
    """The sum in the order of `add_chains`."""
    return ((x0 + x4) + (x2 + x6)) + ((x1 + x5) + (x3 + x7))


@triton.jit
def _largest(lse_ptr, count, NUM_HEADS: tl.constexpr, BLOCK_L: tl.constexpr):
    """The largest log-sum-exp of each head."""
    offs_l = tl.arange(0, BLOCK_L)
    top = tl.full(lse_ptr.shape, float("-inf"), tl.float32)
    for start in tl.range(0, count, BLOCK_L, num_stages=1):
        unit = (start + offs_l)[:, None]
        lse = tl.load(lse_ptr[None, :] + unit * NUM_HEADS, mask=unit < count, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, axis=0))
    return top


@triton.jit
def _add_part(total, acc, lse, o, top):
    weight = tl.exp2(lse - top)
    return total + weight, tl.fma(tl.broadcast_to(weight, o.shape), o, acc)


@triton.jit
def _merge_in_registers(
    lse_ptr, o_ptr, count, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHAINS: tl.constexpr,
):  # fmt: skip
    """Merge any number of units, CHAINS at a time."""
    tl.static_assert(CHAINS == 8)
    top = _largest(lse_ptr, count, NUM_HEADS, 16 * CHAINS)[:, None]
    w0 = tl.zeros_like(top)
    a0 = tl.zeros([top.shape[0], BLOCK_D], tl.float32)
    w1, w2, w3, w4, w5, w6, w7 = w0, w0, w0, w0, w0, w0, w0
    a1, a2, a3, a4, a5, a6, a7 = a0, a0, a0, a0, a0, a0, a0
    for start in tl.range(0, count, CHAINS, num_stages=1):
        o0, o1, o2, o3, o4, o5, o6, o7 = _load_8_outputs(o_ptr, start, count, NUM_HEADS, HEAD_DIM, BLOCK_D)
        l0, l1, l2, l3, l4, l5, l6, l7 = _load_8_lses(lse_ptr, start, count, NUM_HEADS)
        w0, a0 = _add_part(w0, a0, l0, o0, top)
        w1, a1 = _add_part(w1, a1, l1, o1, top)
        w2, a2 = _add_part(w2, a2, l2, o2, top)
        w3, a3 = _add_part(w3, a3, l3, o3, top)
        w4, a4 = _add_part(w4, a4, l4, o4, top)
        w5, a5 = _add_part(w5, a5, l5, o5, top)
        w6, a6 = _add_part(w6, a6, l6, o6, top)
        w7, a7 = _add_part(w7, a7, l7, o7, top)
    return top, _sum_of_8(w0, w1, w2, w3, w4, w5, w6, w7), _sum_of_8(a0, a1, a2, a3, a4, a5, a6, a7)


@triton.jit
def _merge_in_stages(
    lse_ptr, o_ptr, count, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge any number of units, CHAINS at a time, through shared memory."""
    BLOCK_G: tl.constexpr = lse_ptr.shape[0]
    offs_s = tl.arange(0, CHAINS)
    offs_d = tl.arange(0, BLOCK_D)[None, None, :]
    top = _largest(lse_ptr, count, NUM_HEADS, 16 * CHAINS)
    total = tl.zeros([CHAINS, BLOCK_G], tl.float32)
    acc = tl.zeros([CHAINS, BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(0, count, CHAINS, num_stages=STAGES):
        unit = (start + offs_s)[:, None]
        valid = unit < count
        lse = tl.load(lse_ptr[None, :] + unit * NUM_HEADS, mask=valid, other=float("-inf"))
        o = tl.load(
            o_ptr[None, :, :] + unit[:, :, None] * (NUM_HEADS * HEAD_DIM) + offs_d,
            mask=valid[:, :, None] & (offs_d < HEAD_DIM),
            other=0.0,
        )
        weight = tl.exp2(lse - top[None, :])
        total += weight
        acc = tl.fma(weight[:, :, None], o, acc)
    total = add_chains(total[:, :, None], CHAINS)
    return top[:, None], total, add_chains(acc, CHAINS)


@triton.jit
def add_chains(x, CHAINS: tl.constexpr):
    """The sum of x over its first dimension, CHAINS, a power of two: the second half onto the first, and so on."""
    if CHAINS > 1:
        halved = tl.sum(tl.reshape(x, [2, CHAINS // 2, x.shape[1], x.shape[2]]), axis=0)
        return add_chains(halved, CHAINS // 2)
    else:
        return tl.reshape(x, [x.shape[1], x.shape[2]])
