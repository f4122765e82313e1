"""Decode attention: one new token per request attends to its KV in the pool, in splits of a fixed length.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/. A work unit is a split (`split` tokens of KV of one
request) and one KV head. The first kernel computes the partial softmax of each unit. The second kernel merges a
request's partial results by their log-sum-exp. Splits start at multiples of `split`, so a request's arithmetic does not
depend on the other requests of the batch. All query heads of a KV head form one tile, so the KV is read once.

fused_decode.py computes the same in one kernel, with the same functions and so the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import as_kernel_operand, decode_kv, dot, is_interpreted, kv_format, score_scales, tanh
from .tuning import (
    DecodeTile,
    arch_of,
    cdiv,
    decode_tile,
    next_power_of_2,
    num_multiprocessors,
    padded_head_dim,
    programs_that_fit,
)
from .work_map import WorkMap

_MAX_HEAD_BLOCK = 64
MERGE_CHAINS = 8
"""Partial results that are added at a time. The order of the sums, and so their bits, depend on it."""
_MERGE_STAGES = 5
"""Rounds of partial results in shared memory, of which 4 are on their way: 16 KB for 128 components."""
_programs: dict[tuple[object, ...], int] = {}
"""Programs per multiprocessor for which the registers suffice, by all that the compiled split kernel depends on."""


@triton.jit
def as_operand_of(q, KV_FORMAT: tl.constexpr):
    """q in the type of its product with decoded KV."""
    if KV_FORMAT != 0 and q.dtype != tl.float32:
        # fp16 holds e4m3 exactly, and rounds probabilities less than bf16.
        q = q.to(tl.float16)
    return q


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
def attend_to_split(
    q, k_head_ptr, v_head_ptr, row_ptr, part_o_ptr, part_lse_ptr, unit, heads, mask_h, lo, hi, first, stride_slot,
    scale, cap_scale, v_scale, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, KV_FORMAT: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute and store the partial result of the query heads q, [BLOCK_H, BLOCK_D], over positions lo to hi."""
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    compute: tl.constexpr = q.dtype
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in range(lo, hi, BLOCK_N):
        position = start + offs_n
        seen = position < hi
        slots = tl.load(row_ptr + position, mask=seen, other=0).to(tl.int64)
        k = tl.load(
            k_head_ptr + slots[None, :] * stride_slot + offs_d[:, None],
            mask=seen[None, :] & mask_d[:, None],
            other=0.0,
        )
        zero = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        scores = dot(q, decode_kv(k, KV_FORMAT, compute), zero, WIDEN)
        if HAS_CAP:
            scores = tanh(scores * cap_scale)
        if HAS_WINDOW:
            seen &= position >= first
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        fade = tl.exp2(top - new_top)
        p = tl.exp2(tl.fma(scores, scale, -new_top[:, None]))
        total = total * fade + tl.sum(p, axis=1)
        v = tl.load(
            v_head_ptr + slots[:, None] * stride_slot + offs_d[None, :],
            mask=(position < hi)[:, None] & mask_d[None, :],
            other=0.0,
        )
        acc = dot(p.to(compute), decode_kv(v, KV_FORMAT, compute), acc * fade[:, None], WIDEN)
        top = new_top
    part = (unit * NUM_HEADS + heads).to(tl.int64)
    o = acc * v_scale / total[:, None]
    tl.store(part_o_ptr + part[:, None] * HEAD_DIM + offs_d[None, :], o, mask=mask_h[:, None] & mask_d[None, :])
    tl.store(part_lse_ptr + part, top + tl.log2(total), mask=mask_h)


@triton.jit
def merge_splits(
    part_o_ptr, part_lse_ptr, begin, end, heads, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, CHAINS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of units begin to end, for each of `heads`: float32 [heads, BLOCK_D].

    Chain i adds units begin + i, begin + i + CHAINS, and so on. Then chains are added in pairs. A sum of two has one
    order, so neither the number of heads nor the layout of a tile in registers changes the bits. STAGES: while a round
    of CHAINS units is added, the next STAGES - 1 rounds are copied to shared memory.
    """
    BLOCK_G: tl.constexpr = heads.shape[0]
    BLOCK_L: tl.constexpr = 16 * CHAINS
    offs_l = tl.arange(0, BLOCK_L)
    offs_s = tl.arange(0, CHAINS)
    offs_d = tl.arange(0, BLOCK_D)
    # From here on, offsets within the partial results of one request suffice.
    lse_ptr = part_lse_ptr + begin.to(tl.int64) * NUM_HEADS
    o_ptr = part_o_ptr + begin.to(tl.int64) * (NUM_HEADS * HEAD_DIM)
    count = end - begin
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for start in tl.range(0, count, BLOCK_L, num_stages=1):
        part = (start + offs_l)[:, None] * NUM_HEADS + heads[None, :]
        lse = tl.load(lse_ptr + part, mask=(start + offs_l < count)[:, None], other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, axis=0))
    total = tl.zeros([CHAINS, BLOCK_G], tl.float32)
    acc = tl.zeros([CHAINS, BLOCK_G, BLOCK_D], tl.float32)
    for start in tl.range(0, count, CHAINS, num_stages=STAGES):
        valid = (start + offs_s < count)[:, None]
        part = (start + offs_s)[:, None] * NUM_HEADS + heads[None, :]
        lse = tl.load(lse_ptr + part, mask=valid, other=float("-inf"))
        o = tl.load(
            o_ptr + part[:, :, None] * HEAD_DIM + offs_d[None, None, :],
            mask=valid[:, :, None] & (offs_d < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        weight = tl.exp2(lse - top[None, :])
        total += weight
        acc = tl.fma(weight[:, :, None], o, acc)
    total = add_chains(total[:, :, None], CHAINS)
    # A padded request without KV has no partial result: its output is zero.
    return add_chains(acc, CHAINS) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def add_chains(x, CHAINS: tl.constexpr):
    """The sum of x over its first dimension, CHAINS, a power of two: the second half onto the first, and so on."""
    if CHAINS > 1:
        halved = tl.sum(tl.reshape(x, [2, CHAINS // 2, x.shape[1], x.shape[2]]), axis=0)
        return add_chains(halved, CHAINS // 2)
    else:
        return tl.reshape(x, [x.shape[1], x.shape[2]])


# The batch size and the alignment of these buffers vary from step to step. Specialising on them would compile kernels
# while serving.
_INDICES = ["rows_ptr", "seq_lens_ptr", "q_loc_ptr", "work_starts_ptr", "work_rows_ptr"]


@bound
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_INDICES)
def _decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    seq_lens_ptr,
    q_loc_ptr,
    work_starts_ptr,
    work_rows_ptr,
    part_o_ptr,
    part_lse_ptr,
    batch,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_table,
    scale,
    cap_scale,
    v_scale,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_Q_LOC: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    WIDEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    in_group = (tl.program_id(0) % HEAD_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + in_group
    offs_d = tl.arange(0, BLOCK_D)
    mask_h = in_group < GROUP
    num_units = tl.load(work_starts_ptr + batch)
    for unit in range(tl.program_id(1), num_units, tl.num_programs(1)):
        b = tl.load(work_rows_ptr + unit)
        seq_len = tl.load(seq_lens_ptr + b).to(tl.int32)
        split = unit - tl.load(work_starts_ptr + b)
        lo, hi, first = split_bounds(split, seq_len, window, HAS_WINDOW, SPLIT, BLOCK_N)
        if lo < hi:
            q_token = b.to(tl.int64)
            if HAS_Q_LOC:
                q_token = tl.load(q_loc_ptr + b).to(tl.int64)
            q_offsets = q_token * stride_qt + heads[:, None] * stride_qh + offs_d[None, :]
            q = tl.load(q_ptr + q_offsets, mask=mask_h[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
            q = as_operand_of(q, KV_FORMAT)
            row_ptr = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * stride_table
            attend_to_split(
                q, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM, row_ptr, part_o_ptr, part_lse_ptr, unit,
                heads, mask_h, lo, hi, first, stride_slot, scale, cap_scale, v_scale, NUM_HEADS, HEAD_DIM, HAS_CAP,
                HAS_WINDOW, KV_FORMAT, WIDEN, BLOCK_N,
            )  # fmt: skip


@bound
@triton.jit(do_not_specialize_on_alignment=["work_starts_ptr", "seq_lens_ptr", "q_loc_ptr"])
def _decode_merge_kernel(
    part_o_ptr,
    part_lse_ptr,
    work_starts_ptr,
    seq_lens_ptr,
    q_loc_ptr,
    out_ptr,
    window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_Q_LOC: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0)
    head = tl.program_id(1) + tl.arange(0, 1)
    offs_d = tl.arange(0, BLOCK_D)
    begin = tl.load(work_starts_ptr + b)
    end = tl.load(work_starts_ptr + b + 1)
    out_token = b.to(tl.int64)
    if HAS_Q_LOC:
        out_token = tl.load(q_loc_ptr + b).to(tl.int64)
        if begin == end:  # extend attention computes this request
            return
    if HAS_WINDOW:
        seq_len = tl.load(seq_lens_ptr + b).to(tl.int32)
        begin += tl.maximum(seq_len - window, 0) // SPLIT
    out = merge_splits(part_o_ptr, part_lse_ptr, begin, end, head, NUM_HEADS, HEAD_DIM, BLOCK_D, CHAINS, STAGES)
    target = out_ptr + (out_token * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(offs_d < HEAD_DIM)[None, :])


def num_programs(kind: tuple[object, ...], device: torch.device, tile: DecodeTile, head_blocks: int) -> int:
    """The programs for each block of heads. Their number does not change the bits."""
    return max(1, num_multiprocessors(device) * _programs.get(kind, tile.programs) // head_blocks)


def note_registers(kind: tuple[object, ...], arch: str, tile: DecodeTile, compiled: Any) -> None:
    """Learn from the first launch, while the server warms up, how many programs of this kind fit.

    compiled: what the launch returned; None: it did not run.
    """
    if kind not in _programs and compiled is not None:
        fit = programs_that_fit(tile.programs, compiled.n_regs, 32 * tile.num_warps) if arch[:3] == "sm_" else None
        _programs[kind] = fit or tile.programs


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    work: WorkMap,
    out: torch.Tensor,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_loc: torch.Tensor | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Compute out[b] = softmax(cap(q[b] @ K_b * sm_scale)) @ V_b over the KV of each request b.

    q: [T, num_heads, head_dim], last dimension contiguous. q_loc: int [B], the token of each request; None: T == B.
    k_buffer, v_buffer: [slots, num_kv_heads, head_dim], contiguous, of q's dtype or float8_e4m3fn (then K is
    k_buffer * k_scale). req_to_token: int32 [rows, context]; rows, seq_lens: int [B].
    work: `split_map(seq_lens, tile.split, ...)`. A request without a work unit gets no output if q_loc is given, else
    zeros. out: [T, num_heads, head_dim], contiguous.
    soft_cap: scores become cap * tanh(scores / cap). window: number of last positions that are attended to.
    """
    num_tokens, num_heads, head_dim = q.shape
    slots, num_kv_heads, _ = k_buffer.shape
    batch = seq_lens.shape[0]
    assert q.stride(2) == 1 and out.is_contiguous() and out.shape == q.shape
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous()
    assert k_buffer.shape == v_buffer.shape == (slots, num_kv_heads, head_dim)
    assert num_heads % num_kv_heads == 0
    assert req_to_token.stride(1) == 1 and req_to_token.dtype == torch.int32
    assert rows.shape == seq_lens.shape == (batch,) and work.starts.shape == (batch + 1,)
    assert q_loc is not None or num_tokens == batch
    assert window is None or window > 0
    fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == q.dtype)

    arch = arch_of(q.device)
    tile = tile or decode_tile(arch, head_dim, fp32=q.dtype == torch.float32)
    assert work.tile == tile.split and tile.split % tile.block_n == 0
    group = num_heads // num_kv_heads
    # tl.dot needs at least 16 rows.
    block_h = min(max(16, next_power_of_2(group)), _MAX_HEAD_BLOCK)
    block_d = padded_head_dim(head_dim)
    head_blocks = num_kv_heads * cdiv(group, block_h)
    kind = (arch, tile, q.dtype, fp8, head_dim, group, q_loc is None, soft_cap is None, window is None)
    programs = num_programs(kind, q.device, tile, head_blocks)
    part_o = torch.empty(work.capacity, num_heads, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(work.capacity, num_heads, dtype=torch.float32, device=q.device)
    compiled = _decode_split_kernel[(head_blocks, min(programs, work.capacity))](
        q, as_kernel_operand(k_buffer), as_kernel_operand(v_buffer), req_to_token, rows, seq_lens,
        rows if q_loc is None else q_loc, work.starts, work.rows, part_o, part_lse, batch, q.stride(0), q.stride(1),
        k_buffer.stride(0), req_to_token.stride(0), *score_scales(sm_scale * k_scale, soft_cap), v_scale, window or 0,
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, HAS_Q_LOC=q_loc is not None, HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None, KV_FORMAT=kv_format(k_buffer.dtype, arch),
        WIDEN=is_interpreted(_decode_split_kernel) and q.dtype == torch.bfloat16, SPLIT=tile.split, BLOCK_H=block_h,
        BLOCK_N=tile.block_n, BLOCK_D=block_d, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    note_registers(kind, arch, tile, compiled)
    _decode_merge_kernel[(batch, num_heads)](
        part_o, part_lse, work.starts, seq_lens, rows if q_loc is None else q_loc, out, window or 0,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, HAS_Q_LOC=q_loc is not None, HAS_WINDOW=window is not None,
        SPLIT=tile.split, CHAINS=MERGE_CHAINS, STAGES=_MERGE_STAGES, BLOCK_D=block_d,
        num_warps=4,
    )  # fmt: skip


def decode_attention_ref(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """`decode_attention` in plain torch, in q's dtype, for T == B. Returns [B, num_heads, head_dim]."""
    group = q.shape[1] // k_buffer.shape[1]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        n = int(seq_lens[b])
        begin = 0 if window is None else max(n - window, 0)
        slots = req_to_token[rows[b], begin:n].long()
        if not len(slots):
            continue
        k = (k_buffer[slots].to(q.dtype) * k_scale).repeat_interleave(group, 1)
        v = (v_buffer[slots].to(q.dtype) * v_scale).repeat_interleave(group, 1)
        scores = torch.einsum("hd,nhd->hn", q[b], k) * sm_scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out[b] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out
