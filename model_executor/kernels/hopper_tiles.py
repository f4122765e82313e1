"""Parts of extend attention for Hopper GPUs (sm_90a), in Gluon; hopper_extend.py says what it computes.

A stage of shared memory holds a KV tile of BLOCK_N tokens. It consists of boxes of BOX tokens and 64 components, which
TMA writes with a swizzle of 128 bytes. BOX is at most a page, so a tile may consist of two pages, and the products
still see one tile [BLOCK_N, HEAD_DIM]. Two barriers of a stage tell when it is full, and when it is empty.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6, 3.7 and 3.9 have different names for these.
_HAS_OLD_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def view_of(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory as a tensor of another shape."""
    if _HAS_OLD_VIEW:
        return memory._reinterpret(dtype, shape, layout)
    else:
        return memory.reinterpret(dtype, shape, layout)


@gluon.jit
def num_rounds(num_units, NUM_KV_HEADS: gl.constexpr):
    """The number of units of this program."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    total = num_units * NUM_KV_HEADS
    full = total // programs
    last = full * programs + gl.where(full % 2 == 0, pid, programs - 1 - pid)
    return gl.where(last < total, full + 1, full)


@gluon.jit
def unit_of_round(
    turn, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, SPLIT: gl.constexpr, BY_UNIT: gl.constexpr,
):  # fmt: skip
    """The unit of this program's round `turn`: what the producer and the consumers have to know.

    Its query tile attends to positions [lo, hi). BY_UNIT: to one split of them, which may be empty: lo >= hi.
    """
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    i = turn * programs + gl.where(turn % 2 == 0, pid, programs - 1 - pid)
    unit = i // NUM_KV_HEADS
    kv_head = i % NUM_KV_HEADS
    b = gl.load(work_rows_ptr + unit)
    q_start = gl.load(extend_start_ptr + b)
    q_len = (gl.load(extend_start_ptr + b + 1) - q_start).to(gl.int32)
    prefix = gl.load(prefix_lens_ptr + b).to(gl.int32)
    lo = 0
    if BY_UNIT:
        in_request = unit - gl.load(work_starts_ptr + b)
        num_splits = (prefix + q_len + SPLIT - 1) // SPLIT
        tile = in_request // num_splits
        lo = in_request % num_splits * SPLIT
    else:
        # The last query tile of a request attends to the most KV: start it first.
        tile = gl.load(work_starts_ptr + b + 1) - 1 - unit
    last_token = gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    hi = prefix + last_token + 1
    if BY_UNIT:
        hi = gl.minimum(hi, lo + SPLIT)
    return b, unit, kv_head, tile, q_start, q_len, prefix, lo, hi


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _copy_tile(
    pool, boxes, full, empty, stage, phase, slot0, slot1, column,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Wait until a stage is empty, and start the copies of a KV tile to it. slot0, slot1: its pages' first slots."""
    PAGES: gl.constexpr = BLOCK_N // BOX
    COLUMNS: gl.constexpr = HEAD_DIM // 64
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(bar, BLOCK_N * HEAD_DIM * 2)
    for c in gl.static_range(COLUMNS):
        box = stage * (PAGES * COLUMNS) + c * PAGES
        _copy_box(pool, [slot0, column + c * 64], bar, boxes.index(box))
        if PAGES == 2:
            _copy_box(pool, [slot1, column + c * 64], bar, boxes.index(box + 1))


@gluon.jit
def _slots(row_ptr, start, end, BLOCK_N: gl.constexpr, BOX: gl.constexpr):
    """A slot of each page of the tile at `start`. Beyond the end: of a page that exists; its positions are masked."""
    slot0 = gl.load(row_ptr + gl.minimum(start, end - 1))
    slot1 = slot0
    if BLOCK_N > BOX:
        slot1 = gl.load(row_ptr + gl.minimum(start + BOX, end - 1))
    return slot0, slot1


@gluon.jit
def produce(
    k_pool, v_pool, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
    table_ptr, rows_ptr, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
    num_units, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BY_UNIT: gl.constexpr,
):  # fmt: skip
    """The producer: copy the KV tiles of all units, in the order in which the consumers read them."""
    gl.static_assert(BLOCK_N // BOX <= 2)
    stage = 0
    phase = 0
    for turn in range(num_rounds(num_units, NUM_KV_HEADS)):
        b, _, kv_head, _, _, _, _, lo, hi = unit_of_round(
            turn, extend_start_ptr, prefix_lens_ptr, work_starts_ptr, work_rows_ptr,
            NUM_KV_HEADS, GROUP, BLOCK_M, SPLIT, BY_UNIT,
        )  # fmt: skip
        row_ptr = table_ptr + gl.load(rows_ptr + b).to(gl.int64) * stride_table
        column = kv_head * HEAD_DIM
        slot0, slot1 = _slots(row_ptr, lo, hi, BLOCK_N, BOX)
        for start in range(lo, hi, BLOCK_N):
            next0, next1 = _slots(row_ptr, start + BLOCK_N, hi, BLOCK_N, BOX)
            at0 = slot0 // BOX * BOX
            at1 = slot1 // BOX * BOX
            _copy_tile(k_pool, k_boxes, k_full, k_empty, stage, phase, at0, at1, column, HEAD_DIM, BLOCK_N, BOX)
            _copy_tile(v_pool, v_boxes, v_full, v_empty, stage, phase, at0, at1, column, HEAD_DIM, BLOCK_N, BOX)
            slot0 = next0
            slot1 = next1
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _softmax(s, top, total, scale, start, q_pos, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr):
    """The weights of the tile at `start`. Masked tiles and others have the same arithmetic."""
    if MASKED:
        position = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        s = gl.where(position[None, :] <= q_pos[:, None], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, axis=1) * scale)
    pivot = new_top
    if MASKED:
        # Where a split has no position for a query, no score is finite: avoid exp2(-inf - -inf), which is NaN.
        pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
    fade = gl.exp2(top - pivot)
    p = gl.exp2(gl.fma(s, scale, (-pivot)[:, None]))
    total = gl.fma(total, fade, gl.sum(p, axis=1))
    return new_top, total, fade, p


@gluon.jit
def release(bars, stage):
    """Tell the producer that this consumer no longer reads the stage. Its products with it have ended."""
    _barrier()
    mbarrier.arrive(bars.index(stage), count=1)


@gluon.jit
def _step(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    p, acc, top, total, k_stage, k_phase, v_stage, v_phase, scale, start, q_pos,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The scores and weights of the KV tile at `start`, and the product of the weights and values of the tile before.

    p: the weights of the tile before.
    """
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    s = warpgroup_mma(q, k_tiles.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = warpgroup_mma(p, v_tiles.index(v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    release(k_empty, k_stage)
    top, total, fade, weights = _softmax(s, top, total, scale, start, q_pos, MASKED, BLOCK_N, S_LAYOUT)
    # A store that never happens, because a sum of weights is not negative. Without it, ptxas moves the softmax behind
    # the wait for the products that should run meanwhile.
    total = gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 a;
        mov.b32 a, 0;
        setp.lt.f32 p, $1, 0f00000000;
        @p st.shared.b32 [a], $1;
        mov.b32 $0, $1;
        }""",
        "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    acc, weights, total, fade = warpgroup_mma_wait(0, [acc, weights, total, fade])
    release(v_empty, v_stage)
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)[:, None]
    p = gl.convert_layout(weights.to(q.dtype), P_LAYOUT, assert_trivial=True)
    k_stage, k_phase = advance(k_stage, k_phase, STAGES)
    v_stage, v_phase = advance(v_stage, v_phase, STAGES)
    return p, acc, top, total, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def attend(
    q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    k_stage, k_phase, v_stage, v_phase, scale, begin, diagonal, hi, q_pos,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The partial softmax over positions [begin, hi), without the last tile's values. p: the weights of that tile.

    There is no causal mask before `diagonal`.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # The first tile is computed as a masked one, which changes no bits.
    mbarrier.wait(k_full.index(k_stage), k_phase)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k_tiles.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    release(k_empty, k_stage)
    k_stage, k_phase = advance(k_stage, k_phase, STAGES)
    top = gl.full([64], float("-inf"), gl.float32, ROW)
    total = gl.zeros([64], gl.float32, ROW)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, O_LAYOUT)
    top, total, _, weights = _softmax(s, top, total, scale, begin, q_pos, True, BLOCK_N, S_LAYOUT)
    p = gl.convert_layout(weights.to(q.dtype), P_LAYOUT, assert_trivial=True)

    unmasked = gl.minimum(gl.maximum(diagonal, begin + BLOCK_N), hi)
    for start in range(begin + BLOCK_N, unmasked, BLOCK_N):
        p, acc, top, total, k_stage, k_phase, v_stage, v_phase = _step(
            q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            p, acc, top, total, k_stage, k_phase, v_stage, v_phase, scale, start, q_pos,
            False, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
    for start in range(gl.maximum(unmasked, begin + BLOCK_N), hi, BLOCK_N):
        p, acc, top, total, k_stage, k_phase, v_stage, v_phase = _step(
            q, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            p, acc, top, total, k_stage, k_phase, v_stage, v_phase, scale, start, q_pos,
            True, BLOCK_N, STAGES, S_LAYOUT, O_LAYOUT, P_LAYOUT,
        )  # fmt: skip
    return p, acc, top, total, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _clear_tail(v_views, stage, start, written, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Zeros in the rows of V that no token has written: 0 * NaN would be NaN. Both consumers store the same values."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    VIEWS: gl.constexpr = BLOCK_N // 64 * (HEAD_DIM // 64)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    for i in range(VIEWS):
        view = v_views.index(stage * VIEWS + i)
        position = start + i % (BLOCK_N // 64) * 64 + row
        values = view.load(LAYOUT)
        view.store(gl.where((position < written)[:, None], values, 0.0))
    fence_async_shared()


@gluon.jit
def await_last_values(
    v_views, v_full, v_stage, v_phase, hi, written, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Wait for the values of the last tile before `hi`. written: the tokens of the request."""
    mbarrier.wait(v_full.index(v_stage), v_phase)
    last = (hi - 1) // BLOCK_N * BLOCK_N
    if last + BLOCK_N > written:
        _clear_tail(v_views, v_stage, last, written, HEAD_DIM, BLOCK_N)


@gluon.jit
def rows_of(
    kv_head, tile, q_start, WHICH: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """The token in the request, its number in the batch, and the head of each row of a consumer."""
    pair = tile * BLOCK_M + WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    token = pair // GROUP
    return token, q_start.to(gl.int64) + token, kv_head * GROUP + pair % GROUP


@gluon.jit
def load_q(
    q_ptr, kv_head, tile, q_start, q_len, stride_qt, stride_qh,
    WHICH: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The queries of a consumer, [64, HEAD_DIM]. Beyond the last token: zeros."""
    token, line, head = rows_of(kv_head, tile, q_start, WHICH, GROUP, BLOCK_M, LAYOUT)
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    offsets = (line * stride_qt + head * stride_qh)[:, None] + offs_d[None, :]
    return gl.load(q_ptr + offsets, mask=(token < q_len)[:, None], other=0.0)
