"""Decode attention: one new token per request attends to its KV in the pool, in splits of a fixed length.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/. A work unit is a split (`split` tokens of KV of one
request) and one KV head. The first kernel computes the partial softmax of each unit. The second kernel merges a
request's partial results by their log-sum-exp. Splits start at multiples of `split`, so a request's arithmetic does not
depend on the other requests of the batch. All query heads of a KV head form one tile, so the KV is read once.

Where a page has a multiple of `block_n` slots, a KV tile has consecutive slots, and one look-up finds them (`paged`).

fused_decode.py computes the same in one kernel, with the same functions and so the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .bound import bound
from .decode_merge import MERGE_CHAINS, merge_splits
from .decode_split import attend_to_split, load_unit, split_bounds, store_part
from .primitives import as_kernel_operand, as_operand_of, is_interpreted, kv_format, reads_kv_in_pairs, score_scales
from .tuning import (
    DecodeTile,
    arch_of,
    cdiv,
    decode_tile,
    next_power_of_2,
    num_multiprocessors,
    padded_head_dim,
    padded_width,
    programs_that_fit,
)
from .work_map import WorkMap

_MERGE_STAGES = 5
"""Rounds of partial results in shared memory, of which 4 are on their way: 16 KB for 128 components."""
_programs: dict[tuple[object, ...], int] = {}
"""Programs per multiprocessor for which the registers suffice, by all that the compiled split kernel depends on."""


# The batch size and the alignment of these buffers vary from step to step. Specialising on them would compile kernels
# while serving.
_INDICES = ["q_loc_ptr", "work_starts_ptr", "records_ptr"]


@bound
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_INDICES)
def _decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    q_loc_ptr,
    work_starts_ptr,
    records_ptr,
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
    IN_PAIRS: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGED: tl.constexpr,
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
    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    num_units = tl.load(work_starts_ptr + batch)
    for unit in range(tl.program_id(1), num_units, tl.num_programs(1)):
        b, seq_len, begin, row = load_unit(records_ptr, unit)
        lo, hi, first = split_bounds(unit - begin, seq_len, window, HAS_WINDOW, SPLIT, BLOCK_N)
        if lo < hi:
            q_token = b.to(tl.int64)
            if HAS_Q_LOC:
                q_token = tl.load(q_loc_ptr + b).to(tl.int64)
            q_offsets = q_token * stride_qt + heads[:, None] * stride_qh + offs_d[None, :]
            q = tl.load(q_ptr + q_offsets, mask=mask_h[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
            row_ptr = table_ptr + row.to(tl.int64) * stride_table
            top, total, acc = attend_to_split(
                as_operand_of(q, KV_FORMAT), k_head_ptr, v_head_ptr, row_ptr, lo, hi, first, stride_slot, scale,
                cap_scale, HEAD_DIM, HAS_CAP, HAS_WINDOW, KV_FORMAT, IN_PAIRS, WIDEN, PAGED, BLOCK_N,
            )  # fmt: skip
            o = acc * v_scale / total[:, None]
            lse = top + tl.log2(total)
            store_part(o, lse, part_o_ptr, part_lse_ptr, unit, heads, mask_h, NUM_HEADS, HEAD_DIM)


@bound
@triton.jit(do_not_specialize_on_alignment=["work_starts_ptr", "seq_lens_ptr", "q_loc_ptr", "sinks_ptr"])
def _decode_merge_kernel(
    part_o_ptr,
    part_lse_ptr,
    work_starts_ptr,
    seq_lens_ptr,
    q_loc_ptr,
    out_ptr,
    window,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_Q_LOC: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    out = merge_splits(
        part_o_ptr, part_lse_ptr, begin, end, head, sinks_ptr, HAS_SINKS, NUM_HEADS, HEAD_DIM, BLOCK_D, CHAINS, STAGES
    )
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
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_loc: torch.Tensor | None = None,
    tile: DecodeTile | None = None,
) -> None:
    """Compute out[b] = softmax(cap(q[b] @ K_b * sm_scale), sinks) @ V_b over the KV of each request b.

    q: [T, num_heads, head_dim], last dimension contiguous. q_loc: int [B], the token of each request; None: T == B.
    k_buffer, v_buffer: [slots, num_kv_heads, head_dim], contiguous, of q's dtype or float8_e4m3fn (then K is
    k_buffer * k_scale). req_to_token: int32 [rows, context]; rows, seq_lens: int [B].
    work: `split_map(seq_lens, rows, tile.split, ...)`. A request without a work unit gets no output if q_loc is given,
    else zeros. out: [T, num_heads, head_dim], contiguous.
    soft_cap: scores become cap * tanh(scores / cap). window: number of last positions that are attended to. sinks: a
    logit for each head that joins its softmax without a value, float32 [num_heads], contiguous.
    tile: one that is `paged` needs pages of a multiple of `block_n` slots. None: one that serves every page size.
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
    check_sinks(sinks, num_heads)
    fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == q.dtype)

    arch = arch_of(q.device)
    tile = tile or decode_tile(arch, head_dim, fp32=q.dtype == torch.float32, fp8=fp8)
    assert work.tile == tile.split and tile.split % tile.block_n == 0 and work.records is not None
    group = num_heads // num_kv_heads
    # tl.dot needs at least 16 rows.
    block_h = min(max(16, next_power_of_2(group)), tile.max_heads)
    block_d = padded_head_dim(head_dim)
    head_blocks = num_kv_heads * cdiv(group, block_h)
    kind = (arch, tile, q.dtype, fp8, head_dim, group, q_loc is None, soft_cap is None, window is None)
    programs = num_programs(kind, q.device, tile, head_blocks)
    part_o = torch.empty(work.capacity, num_heads, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(work.capacity, num_heads, dtype=torch.float32, device=q.device)
    compiled = _decode_split_kernel[(head_blocks, min(programs, work.capacity))](
        q, as_kernel_operand(k_buffer), as_kernel_operand(v_buffer), req_to_token,
        rows if q_loc is None else q_loc, work.starts, work.records, part_o, part_lse, batch, q.stride(0), q.stride(1),
        k_buffer.stride(0), req_to_token.stride(0), *score_scales(sm_scale * k_scale, soft_cap), v_scale, window or 0,
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, HAS_Q_LOC=q_loc is not None, HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None, KV_FORMAT=kv_format(k_buffer.dtype, arch),
        IN_PAIRS=reads_kv_in_pairs(k_buffer.dtype, head_dim, arch),
        WIDEN=is_interpreted(_decode_split_kernel) and q.dtype == torch.bfloat16, PAGED=tile.paged, SPLIT=tile.split,
        BLOCK_H=block_h, BLOCK_N=tile.block_n, BLOCK_D=block_d, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    note_registers(kind, arch, tile, compiled)
    merge_parts(part_o, part_lse, seq_lens, rows, work, out, q_loc=q_loc, window=window, sinks=sinks)


def merge_parts(
    part_o: torch.Tensor,
    part_lse: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    work: WorkMap,
    out: torch.Tensor,
    *,
    q_loc: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge the partial results of splits.

    part_o: float32 [units, num_heads, value_dim], the output of each split; part_lse: float32 [units, num_heads], its
    log-sum-exp, in base 2. out: [T, num_heads, value_dim], contiguous. Other arguments as in `decode_attention`.
    """
    _, num_heads, value_dim = part_o.shape
    _decode_merge_kernel[(len(seq_lens), num_heads)](
        part_o, part_lse, work.starts, seq_lens, rows if q_loc is None else q_loc, out, window or 0,
        part_lse if sinks is None else sinks, NUM_HEADS=num_heads, HEAD_DIM=value_dim, HAS_Q_LOC=q_loc is not None,
        HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None, SPLIT=work.tile, CHAINS=MERGE_CHAINS,
        STAGES=_MERGE_STAGES, BLOCK_D=padded_width(value_dim), num_warps=4,
    )  # fmt: skip


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    """Assert what attention kernels ask of sinks."""
    if sinks is not None:
        assert sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous()


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The weights of scores [num_heads, ..., N], in plain torch. Those of the sinks are left out."""
    if sinks is None:
        return scores.softmax(-1)
    own = sinks.to(scores.dtype).view(-1, *[1] * (scores.dim() - 1)).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, own], -1).softmax(-1)[..., :-1]


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
    sinks: torch.Tensor | None = None,
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
        out[b] = torch.einsum("hn,nhd->hd", softmax_with_sinks(scores, sinks), v)
    return out
