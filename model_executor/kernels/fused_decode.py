"""The attention of a decode step of few requests in one kernel: rotation, store of K and V, splits, and their merge.

The kernel computes what `rotary` and `decode_attention` compute, with the same functions in the same order, so with the
same bits.

- Each program normalises and rotates the query heads of its work unit. Only one unit needs K and V of the new token:
  the last split of its request and KV head. The program of that unit stores them before it reads its split.
- The program that stores the last partial result of a request and KV head merges them. Programs count these results
  with an atomic addition, which releases what they stored and acquires what others stored. The last one sets the count
  back to zero for the next launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import bound
from .decode_attention import check_sinks, decode_attention_ref, note_registers, num_programs
from .decode_merge import MERGE_CHAINS, merge_splits
from .decode_split import attend_to_split, load_unit, split_bounds, store_part
from .dependent_launch import launch_options, let_next_start, wait_for_previous
from .primitives import (
    as_kernel_operand,
    as_operand_of,
    is_interpreted,
    kv_format,
    reads_kv_in_pairs,
    score_scales,
    sink_weight,
)
from .rotary import load_heads, load_queries, rotary_ref, store_heads, turn_heads, turn_queries
from .tuning import DecodeTile, arch_of, decode_tile, next_power_of_2, padded_head_dim
from .work_map import WorkMap

_MAX_GROUP = 16
"""Query heads of a KV head: the rows of one tile."""
_MERGED_COLUMNS, _MERGED_COLUMNS_FP32 = 128, 32
"""Columns for each warp of a tile that merges. It has several heads if they are narrow. Wider tiles spill registers on
sm_90."""


def can_fuse_decode(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `fused_decode` serves these heads.

    More query heads for a KV head need several tiles, which would all have to wait for the new K and V. In float32,
    wider heads spill registers.
    """
    return num_heads // num_kv_heads <= _MAX_GROUP and (dtype != torch.float32 or head_dim <= 128)


# The batch size and the alignment of these buffers vary from step to step.
@bound
@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=["slots_ptr", "work_starts_ptr", "records_ptr", "sinks_ptr"],
)
def _fused_decode_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    table_ptr,
    work_starts_ptr,
    records_ptr,
    part_o_ptr,
    part_lse_ptr,
    counts_ptr,
    out_ptr,
    batch,
    stride_t,
    stride_h,
    stride_angle,
    stride_slot,
    stride_table,
    eps,
    inv_k_scale,
    inv_v_scale,
    scale,
    cap_scale,
    v_scale,
    window,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    WIDEN: tl.constexpr,
    PAGED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        wait_for_previous()
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(0)
    in_group = tl.arange(0, BLOCK_H)
    heads = kv_head * GROUP + in_group
    mask_h = in_group < GROUP
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    num_units = tl.load(work_starts_ptr + batch)
    # Before the loop, so that it does not wait for num_units. There are no more programs than records.
    b, seq_len, begin, row = load_unit(records_ptr, tl.program_id(1))
    for unit in range(tl.program_id(1), num_units, tl.num_programs(1)):
        next_b, next_len, next_begin, next_row = load_unit(
            records_ptr, tl.minimum(unit + tl.num_programs(1), num_units - 1)
        )
        lo, hi, first = split_bounds(unit - begin, seq_len, window, HAS_WINDOW, SPLIT, BLOCK_N)
        if lo < hi:
            # All loads that need only the record come first, and what waits for them after that.
            token = b.to(tl.int64)
            token_ptr = qkv_ptr + token * stride_t
            cos_row_ptr = cos_ptr + token * stride_angle
            sin_row_ptr = sin_ptr + token * stride_angle
            row_ptr = table_ptr + row.to(tl.int64) * stride_table
            own, other, cos, sin = load_queries(
                token_ptr, cos_row_ptr, sin_row_ptr, heads, mask_h, stride_h, HEAD_DIM, BLOCK_D
            )
            # Rows 0 and 1 of a tile: the new token's K and V.
            has_new = hi == seq_len
            new = NUM_HEADS + kv_head + in_group * NUM_KV_HEADS
            x, y, mask = load_heads(token_ptr, new, in_group < tl.where(has_new, 2, 0), stride_h, HEAD_DIM, BLOCK_HALF)
            slot = tl.load(slots_ptr + b).to(tl.int64) * stride_slot
            if has_new:
                x, y = turn_heads(
                    x, y, cos_row_ptr, sin_row_ptr, q_weight_ptr, k_weight_ptr, new, eps, NUM_HEADS, NUM_KV_HEADS,
                    HEAD_DIM, HAS_NORM,
                )  # fmt: skip
                store_heads(
                    x, y, mask, new, k_ptr + slot, v_ptr + slot, inv_k_scale, inv_v_scale, dtype, NUM_HEADS,
                    NUM_KV_HEADS, HEAD_DIM, KV_FORMAT != 0,
                )  # fmt: skip
                tl.debug_barrier()  # other threads of this program read them
            q = turn_queries(
                own, other, cos, sin, token_ptr, q_weight_ptr, heads, mask_h, stride_h, eps, HEAD_DIM, HAS_NORM,
                BLOCK_D, BLOCK_HALF,
            )  # fmt: skip
            top, total, acc = attend_to_split(
                as_operand_of(q, KV_FORMAT), k_head_ptr, v_head_ptr, row_ptr, lo, hi, first, stride_slot, scale,
                cap_scale, HEAD_DIM, HAS_CAP, HAS_WINDOW, KV_FORMAT, IN_PAIRS, WIDEN, PAGED, BLOCK_N,
            )  # fmt: skip
            if DEPENDENT:
                let_next_start()
            o = acc * v_scale / total[:, None]
            lse = top + tl.log2(total)
            end = begin + (seq_len + SPLIT - 1) // SPLIT
            begin += first // SPLIT
            if end - begin == 1:
                # Merging one partial result multiplies it by 1, and adds zeros: -0 becomes 0. Then it adds the sinks.
                o += 0.0
                if HAS_SINKS:
                    sink = tl.load(sinks_ptr + heads, mask=mask_h, other=0.0)
                    o /= (1.0 + sink_weight(sink, lse))[:, None]
                target = out_ptr + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + offs_d[None, :]
                inside = mask_h[:, None] & (offs_d < HEAD_DIM)[None, :]
                tl.store(target, o.to(dtype), mask=inside)
            else:
                store_part(o, lse, part_o_ptr, part_lse_ptr, unit, heads, mask_h, NUM_HEADS, HEAD_DIM)
                count_ptr = counts_ptr + b * NUM_KV_HEADS + kv_head
                tl.debug_barrier()  # all threads have stored their part
                if tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == end - begin - 1:
                    tl.store(count_ptr, 0)
                    for g in tl.range(0, GROUP, BLOCK_G, num_stages=1):
                        some = kv_head * GROUP + tl.minimum(g + offs_g, GROUP - 1)
                        merged = merge_splits(
                            part_o_ptr, part_lse_ptr, begin, end, some, sinks_ptr, HAS_SINKS, NUM_HEADS, HEAD_DIM,
                            BLOCK_D, CHAINS, 1,
                        )  # fmt: skip
                        target = out_ptr + (token * NUM_HEADS + some)[:, None] * HEAD_DIM + offs_d[None, :]
                        inside = (g + offs_g < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
                        tl.store(target, merged.to(dtype), mask=inside)
        b, seq_len, begin, row = next_b, next_len, next_begin, next_row


def fused_decode(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    work: WorkMap,
    counts: torch.Tensor,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile: DecodeTile | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    """`rotary` and `decode_attention` for one token of each request: the output, [B, num_heads, head_dim].

    K and V of the tokens are stored at `slots`, which are also the last slots of the requests in `req_to_token`. qkv
    does not change. The arguments are those of the two functions, with these limits: `can_fuse_decode`; every request
    has at least one token, the new one.
    counts: int32 of at least B * num_kv_heads zeros, contiguous. They are zeros again when the kernel ends.
    dependent: whether the launch is dependent (dependent_launch.py).
    """
    batch, num_qkv_heads, head_dim = qkv.shape
    num_slots, num_kv_heads, _ = k_buffer.shape
    assert qkv.stride(2) == 1 and num_qkv_heads == num_heads + 2 * num_kv_heads and num_heads % num_kv_heads == 0
    assert can_fuse_decode(num_heads, num_kv_heads, head_dim, qkv.dtype)
    assert cos.shape == sin.shape == (batch, head_dim // 2) and cos.stride() == sin.stride() and head_dim % 2 == 0
    assert cos.stride(1) == 1 and cos.dtype == sin.dtype == torch.float32
    assert (q_weight is None) == (k_weight is None)
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous()
    assert k_buffer.shape == v_buffer.shape == (num_slots, num_kv_heads, head_dim)
    assert req_to_token.stride(1) == 1 and req_to_token.dtype == torch.int32
    assert rows.shape == seq_lens.shape == slots.shape == (batch,) and work.starts.shape == (batch + 1,)
    assert slots.is_contiguous() and counts.is_contiguous()
    assert counts.dtype == torch.int32 and counts.numel() >= batch * num_kv_heads
    assert window is None or window > 0
    check_sinks(sinks, num_heads)
    fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == qkv.dtype)

    arch = arch_of(qkv.device)
    tile = tile or decode_tile(arch, head_dim, fp32=qkv.dtype == torch.float32, fp8=fp8)
    assert work.tile == tile.split and tile.split % tile.block_n == 0 and work.records is not None
    block_d, group = padded_head_dim(head_dim), num_heads // num_kv_heads
    columns = _MERGED_COLUMNS_FP32 if qkv.dtype == torch.float32 else _MERGED_COLUMNS
    options = (q_weight is None, soft_cap is None, window is None, sinks is None)
    kind = ("fused", arch, tile, qkv.dtype, fp8, head_dim, group, *options)
    programs = num_programs(kind, qkv.device, tile, num_kv_heads)
    part_o = torch.empty(work.capacity, num_heads, head_dim, dtype=torch.float32, device=qkv.device)
    part_lse = torch.empty(work.capacity, num_heads, dtype=torch.float32, device=qkv.device)
    out = torch.empty(batch, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    compiled = _fused_decode_kernel[(num_kv_heads, min(programs, work.capacity))](
        qkv,
        cos,
        sin,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        as_kernel_operand(k_buffer),
        as_kernel_operand(v_buffer),
        slots,
        req_to_token,
        work.starts,
        work.records,
        part_o,
        part_lse,
        counts,
        out,
        batch,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        k_buffer.stride(0),
        req_to_token.stride(0),
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        *score_scales(sm_scale * k_scale, soft_cap),
        v_scale,
        window or 0,
        part_lse if sinks is None else sinks,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_NORM=q_weight is not None,
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        KV_FORMAT=kv_format(k_buffer.dtype, arch),
        IN_PAIRS=reads_kv_in_pairs(k_buffer.dtype, head_dim, arch),
        WIDEN=is_interpreted(_fused_decode_kernel) and qkv.dtype == torch.bfloat16,
        PAGED=tile.paged,
        SPLIT=tile.split,
        BLOCK_H=_MAX_GROUP,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        BLOCK_G=min(next_power_of_2(group), max(1, columns * tile.num_warps // block_d)),
        CHAINS=MERGE_CHAINS,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(dependent=dependent),
    )
    note_registers(kind, arch, tile, compiled)
    return out


def fused_decode_ref(
    qkv: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """`fused_decode` in plain torch."""
    qkv = qkv.clone()
    rotary_ref(
        qkv, num_heads, k_buffer.shape[1], cos, sin, q_weight=q_weight, k_weight=k_weight, eps=eps, k_buffer=k_buffer,
        v_buffer=v_buffer, slots=slots, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    return decode_attention_ref(
        qkv[:, :num_heads], k_buffer, v_buffer, req_to_token, rows, seq_lens, sm_scale=sm_scale, soft_cap=soft_cap,
        window=window, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
