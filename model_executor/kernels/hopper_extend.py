"""Extend attention for Hopper GPUs: asynchronous products, and groups of warps with tasks of their own.

Source: FlashAttention-3, https://arxiv.org/abs/2407.08608. The kernel computes what `extend_attention` computes, with
the same query tiles and splits, and merges splits with the same formula. The order of sums within a tile differs, so
the bits do, too: a server uses one of the two kernels only.

A program has three groups of warps. One warp, the producer, copies K and V with TMA. Two consumers of four warps each
have 64 rows of a query tile each. A consumer starts the product of its queries and the next K before the product of its
weights and this V. So its products run while it computes the softmax.

A work unit is a query tile and a KV head, or one split of their KV (`extend_work`). `extend_merge_kernel` merges the
splits that are units. There is one program for each multiprocessor, and programs take units there and back: program p
of G takes units p, 2 * G - 1 - p, 2 * G + p, and so on. The longest tiles of a request come first.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .bound import bound
from .extend_attention import check_operands, merge_units
from .hopper_tiles import (
    advance,
    attend,
    await_last_values,
    load_q,
    num_rounds,
    produce,
    release,
    rows_of,
    unit_of_round,
    view_of,
)
from .primitives import score_scales
from .tuning import HOPPER_HEAD_DIMS, HOPPER_PAGE, HOPPER_TILE, num_multiprocessors
from .work_map import WorkMap

_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24
_REGISTERS = 168
"""Registers of a thread before the groups divide them."""


@gluon.jit
def _consume(
    WHICH: gl.constexpr,
    q_smem, k_tiles, v_tiles, v_views, merged_smem, k_full, k_empty, v_full, v_empty,
    q_ptr, out_ptr, part_top_ptr, part_total_ptr, part_o_ptr,
    extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
    num_units, stride_qt, stride_qh, scale,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BY_UNIT: gl.constexpr,
):  # fmt: skip
    """Consumer WHICH: the results of 64 rows of each unit."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q = q_smem.index(WHICH)
    merged = merged_smem.index(WHICH)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    rounds = num_rounds(num_units, NUM_KV_HEADS)
    if rounds > 0:
        _, unit, kv_head, tile, q_start, q_len, prefix, lo, hi = unit_of_round(
            0, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
            NUM_KV_HEADS, GROUP, BLOCK_M, SPLIT, BY_UNIT,
        )  # fmt: skip
        q_rows = load_q(
            q_ptr, kv_head, tile, q_start, q_len, stride_qt, stride_qh, WHICH, GROUP, HEAD_DIM, BLOCK_M, Q_LAYOUT
        )  # fmt: skip
        for turn in range(rounds):
            q.store(q_rows)
            fence_async_shared()
            first_pair = tile * BLOCK_M + WHICH * 64
            q_pos = prefix + (first_pair + gl.arange(0, 64, ROW)) // GROUP
            # The first query of this consumer attends to all KV before `diagonal`, and so do the others.
            diagonal = gl.minimum((prefix + first_pair // GROUP + 1) // BLOCK_N * BLOCK_N, hi)
            following = gl.minimum(turn + 1, rounds - 1)
            top = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            acc = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
            for begin in range(lo, hi, SPLIT):
                end = gl.minimum(hi, begin + SPLIT)
                p, acc, next_top, next_total, k_stage, k_phase, v_stage, v_phase = attend(
                    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                    k_stage, k_phase, v_stage, v_phase, scale, begin, diagonal, end, q_pos,
                    HEAD_DIM, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
                await_last_values(v_views, v_full, v_stage, v_phase, end, prefix + q_len, HEAD_DIM, BLOCK_N)
                acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
                release(v_empty, v_stage)
                v_stage, v_phase = advance(v_stage, v_phase, STAGES)
                if begin > lo:
                    new_top = gl.maximum(top, next_top)
                    pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
                    old, new = gl.exp2(top - pivot), gl.exp2(next_top - pivot)
                    total = gl.fma(total, old, next_total * new)
                    old = gl.convert_layout(old, O_ROW, assert_trivial=True)[:, None]
                    new = gl.convert_layout(new, O_ROW, assert_trivial=True)[:, None]
                    acc = gl.fma(merged.load(O_LAYOUT), old, acc * new)
                    top = new_top
                else:
                    top, total = next_top, next_total
                if end < hi:
                    merged.store(acc)
            # The queries of the next unit arrive while the results of this one are stored.
            _, next_unit, next_head, next_tile, next_start, next_len, next_prefix, next_lo, next_hi = unit_of_round(
                following, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
                NUM_KV_HEADS, GROUP, BLOCK_M, SPLIT, BY_UNIT,
            )  # fmt: skip
            q_rows = load_q(
                q_ptr, next_head, next_tile, next_start, next_len, stride_qt, stride_qh,
                WHICH, GROUP, HEAD_DIM, BLOCK_M, Q_LAYOUT,
            )  # fmt: skip

            if BY_UNIT:
                if lo < hi:
                    part = (unit * NUM_KV_HEADS + kv_head).to(gl.int64) * BLOCK_M + WHICH * 64
                    row = part + gl.arange(0, 64, ROW)
                    gl.store(part_top_ptr + row, top)
                    gl.store(part_total_ptr + row, total)
                    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O_LAYOUT))
                    row = part + gl.arange(0, 64, O_ROW)
                    gl.store(part_o_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], acc)
            else:
                o = acc / gl.convert_layout(total, O_ROW, assert_trivial=True)[:, None]
                # The output takes the place of Q, and is stored in whole lines.
                q.store(o.to(q.dtype))
                token, line, head = rows_of(kv_head, tile, q_start, WHICH, GROUP, BLOCK_M, Q_LAYOUT)
                offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, Q_LAYOUT))
                offsets = ((line * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + offs_d[None, :]
                gl.store(out_ptr + offsets, q.load(Q_LAYOUT), mask=(token < q_len)[:, None])
            unit, kv_head, tile, q_start = next_unit, next_head, next_tile, next_start
            q_len, prefix, lo, hi = next_len, next_prefix, next_lo, next_hi


@gluon.jit
def _consume_0(
    shared, pointers, numbers, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BY_UNIT: gl.constexpr,
):  # fmt: skip
    _consume(0, *shared, *pointers, *numbers, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, SPLIT, BY_UNIT)


@gluon.jit
def _consume_1(
    shared, pointers, numbers, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BY_UNIT: gl.constexpr,
):  # fmt: skip
    _consume(1, *shared, *pointers, *numbers, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, SPLIT, BY_UNIT)


# The batch size and the alignment of these buffers vary from step to step. Specialising on them would compile kernels
# while serving.
@bound
@gluon.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=[
        "rows_ptr", "extend_start_ptr", "prefix_lens_ptr", "work_starts_ptr", "work_rows_ptr",
    ],
)  # fmt: skip
def hopper_extend_kernel(
    q_ptr, k_pool, v_pool, table_ptr, rows_ptr, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
    part_top_ptr, part_total_ptr, part_o_ptr, out_ptr, batch, stride_qt, stride_qh, stride_table, scale,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BY_UNIT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(BLOCK_M == 128)
    BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX) * (HEAD_DIM // 64)
    VIEWS: gl.constexpr = STAGES * (BLOCK_N // 64) * (HEAD_DIM // 64)
    dtype: gl.constexpr = k_pool.dtype
    LAYOUT: gl.constexpr = k_pool.layout
    MERGED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    num_units = gl.load(work_starts_ptr + batch)
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], LAYOUT)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, 64], LAYOUT)
    v_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, 64], LAYOUT)
    k_tiles = view_of(k_boxes, dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    v_tiles = view_of(v_boxes, dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    v_views = view_of(v_boxes, dtype, [VIEWS, 64, 64], LAYOUT)
    # The merged result of the splits so far. A thread reads only what it has written.
    merged_smem = gl.allocate_shared_memory(gl.float32, [2, 64, HEAD_DIM], MERGED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    shared = (q_smem, k_tiles, v_tiles, v_views, merged_smem, k_full, k_empty, v_full, v_empty)
    pointers = (
        q_ptr, out_ptr, part_top_ptr, part_total_ptr, part_o_ptr,
        extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
    )  # fmt: skip
    numbers = (num_units, stride_qt, stride_qh, scale)
    gl.warp_specialize(
        [
            (_consume_0, (
                shared, pointers, numbers, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, SPLIT, BY_UNIT,
            )),
            (_consume_1, (
                shared, pointers, numbers, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, SPLIT, BY_UNIT,
            )),
            (produce, (
                k_pool, v_pool, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
                table_ptr, rows_ptr, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
                num_units, stride_table, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_N, BOX, STAGES,
                SPLIT, BY_UNIT,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def hopper_extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    extend_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    work: WorkMap,
    out: torch.Tensor,
    *,
    sm_scale: float,
    page_size: int,
) -> None:
    """`extend_attention` in bfloat16, without a window and a soft cap, for HOPPER_HEAD_DIMS.

    work: a result of `extend_work` for HOPPER_TILE. page_size: a multiple of HOPPER_PAGE; pages start at its multiples.
    Other arguments as in `extend_attention`.
    """
    _, num_heads, head_dim = q.shape
    slots, num_kv_heads, _ = k_buffer.shape
    tile, box = HOPPER_TILE, min(page_size, HOPPER_TILE.block_n)
    check_operands(q, k_buffer, v_buffer, req_to_token, out)
    assert head_dim in HOPPER_HEAD_DIMS and q.dtype == k_buffer.dtype == v_buffer.dtype == torch.bfloat16
    assert page_size % HOPPER_PAGE == 0 == page_size % box and slots % box == 0
    assert work.tile == tile.block_m and work.split in (None, tile.split)
    width, group, batch = num_kv_heads * head_dim, num_heads // num_kv_heads, len(prefix_lens)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    k_pool, v_pool = (
        TensorDescriptor(pool.view(slots, width), [slots, width], [width, 1], [box, 64], layout)
        for pool in (k_buffer, v_buffer)
    )
    units = work.capacity * num_kv_heads
    num_rows = max(4, units * tile.block_m if work.split else 0)  # so that part_total is aligned to 16 bytes, too
    part_top, part_total = torch.empty(2, num_rows, dtype=torch.float32, device=q.device)
    part_o = torch.empty(num_rows, head_dim, dtype=torch.float32, device=q.device)
    hopper_extend_kernel[(min(units, num_multiprocessors(q.device)),)](
        q, k_pool, v_pool, req_to_token, rows, extend_start_loc, prefix_lens, work.starts, work.rows, part_top,
        part_total, part_o, out, batch, q.stride(0), q.stride(1), req_to_token.stride(0),
        score_scales(sm_scale, None)[0],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BOX=box,
        STAGES=tile.num_stages, SPLIT=tile.split, BY_UNIT=work.split is not None,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=tile.num_warps,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    if work.split is not None:
        merge_units(
            part_top, part_total, part_o, extend_start_loc, prefix_lens, work, out, num_heads=num_heads, tile=tile
        )
