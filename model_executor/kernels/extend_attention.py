"""Extend attention: the new tokens of each request attend to its cached prefix and to each other.

Source: FlashAttention-2, https://arxiv.org/abs/2307.08691. The pool already holds the KV of the new tokens. The kernel
reads the KV of the prefix and of the new tokens in the same way, through the table of slots. A query tile is `block_m`
pairs (token, query head) of one request and one KV head. All query heads of the group are in it, so the KV is read once
for them. KV tiles start at multiples of `block_n`, counted from position 0. A KV tile that is masked for a query does
not change the query's sums. So a token's arithmetic does not depend on the chunks of its prompt or on other requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .primitives import as_kernel_operand, decode_kv, dot, is_interpreted, kv_format, score_scales, tanh
from .tuning import ExtendTile, arch_of, extend_tile, padded_head_dim
from .work_map import WorkMap


@triton.jit
def _attend(
    q,
    top,
    total,
    acc,
    start,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to the KV tile at positions [start, start + BLOCK_N). Not MASKED: no causal mask, but a window may be."""
    compute: tl.constexpr = q.dtype
    position = start + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    if MASKED:
        valid = position < end
        slots = tl.load(row_ptr + position, mask=valid, other=0).to(tl.int64)
        k_offsets = slots[None, :] * stride_slot + offs_d[:, None]
        k = tl.load(k_head_ptr + k_offsets, mask=valid[None, :] & mask_d[:, None], other=0.0)
    else:
        slots = tl.load(row_ptr + position).to(tl.int64)
        k_offsets = slots[None, :] * stride_slot + offs_d[:, None]
        if HEAD_DIM == BLOCK_D:
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
    # Before its window a query has no finite score: avoid exp2(-inf - -inf), which is NaN.
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top) if HAS_WINDOW else new_top
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
    return new_top, total, acc


# The batch size and the alignment of these buffers vary from step to step. Specialising on them would compile kernels
# while serving.
_INDICES = ["rows_ptr", "extend_start_ptr", "prefix_lens_ptr", "work_starts_ptr", "work_rows_ptr"]


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=_INDICES)
def _extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    rows_ptr,
    extend_start_ptr,
    prefix_lens_ptr,
    work_starts_ptr,
    work_rows_ptr,
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
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    unit = tl.program_id(0)
    kv_head = tl.program_id(1)
    if unit >= tl.load(work_starts_ptr + batch):
        return
    b = tl.load(work_rows_ptr + unit)
    # The last query tile of a request attends to the most KV: start it first.
    tile = tl.load(work_starts_ptr + b + 1) - 1 - unit
    q_start = tl.load(extend_start_ptr + b)
    q_len = (tl.load(extend_start_ptr + b + 1) - q_start).to(tl.int32)
    prefix = tl.load(prefix_lens_ptr + b).to(tl.int32)

    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    q_pos = prefix + token
    offs_d = tl.arange(0, BLOCK_D)
    mask = (token < q_len)[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_dtype: tl.constexpr = q_ptr.dtype.element_ty
    if KV_FORMAT == 0:
        compute: tl.constexpr = q_dtype
    elif q_dtype == tl.float32:
        compute: tl.constexpr = tl.float32
    else:
        # fp16 holds e4m3 exactly, and rounds probabilities less than bf16.
        compute: tl.constexpr = tl.float16
    q_offsets = (q_start.to(tl.int64) + token[:, None]) * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(compute)

    k_head_ptr = k_ptr + kv_head * HEAD_DIM
    v_head_ptr = v_ptr + kv_head * HEAD_DIM
    row_ptr = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * stride_table
    first_token = tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, q_len - 1)
    end = prefix + last_token + 1
    # The first query of the query tile attends to all KV before `diagonal`, and so do the others: no causal mask.
    diagonal = (prefix + first_token + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(prefix + first_token - window + 1, 0) // BLOCK_N * BLOCK_N
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, diagonal, BLOCK_N):
        top, total, acc = _attend(
            q, top, total, acc, start, end, q_pos,
            k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window,
            HEAD_DIM, False, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    for start in range(tl.maximum(begin, diagonal), end, BLOCK_N):
        top, total, acc = _attend(
            q, top, total, acc, start, end, q_pos,
            k_head_ptr, v_head_ptr, row_ptr, stride_slot, scale, cap_scale, window,
            HEAD_DIM, True, HAS_CAP, HAS_WINDOW, KV_FORMAT, WIDEN, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    if HAS_WINDOW:
        total = tl.where(total == 0.0, 1.0, total)  # rows beyond the request's last token, which are not stored
    out = acc * v_scale / total[:, None]
    out_offsets = ((q_start.to(tl.int64) + token[:, None]) * NUM_HEADS + head[:, None]) * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def extend_attention(
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
    soft_cap: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile: ExtendTile | None = None,
) -> None:
    """Compute causal attention of each new token t to positions 0 .. p(t) of its request, where p(t) is its position.

    q: [T, num_heads, head_dim], last dimension contiguous. Tokens [extend_start_loc[b], extend_start_loc[b + 1]) belong
    to request b and have positions prefix_lens[b], prefix_lens[b] + 1, ... extend_start_loc: int [B + 1]; rows,
    prefix_lens: int [B]. work: `query_tile_map(extend_start_loc, group, tile.block_m, T)`. Requests without a work unit
    (those with one new token) get no output. Other arguments as in `decode_attention`.
    """
    _, num_heads, head_dim = q.shape
    slots, num_kv_heads, _ = k_buffer.shape
    batch = prefix_lens.shape[0]
    assert q.stride(2) == 1 and out.is_contiguous() and out.shape == q.shape
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous()
    assert k_buffer.shape == v_buffer.shape == (slots, num_kv_heads, head_dim)
    assert num_heads % num_kv_heads == 0
    assert req_to_token.stride(1) == 1 and req_to_token.dtype == torch.int32
    assert rows.shape == prefix_lens.shape == (batch,)
    assert extend_start_loc.shape == work.starts.shape == (batch + 1,)
    assert window is None or window > 0
    fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == q.dtype)

    arch = arch_of(q.device)
    tile = tile or extend_tile(arch, head_dim, fp8, fp32=q.dtype == torch.float32)
    assert work.tile == tile.block_m
    _extend_kernel[(work.capacity, num_kv_heads)](
        q,
        as_kernel_operand(k_buffer),
        as_kernel_operand(v_buffer),
        req_to_token,
        rows,
        extend_start_loc,
        prefix_lens,
        work.starts,
        work.rows,
        out,
        batch,
        q.stride(0),
        q.stride(1),
        k_buffer.stride(0),
        req_to_token.stride(0),
        *score_scales(sm_scale * k_scale, soft_cap),
        v_scale,
        window or 0,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        KV_FORMAT=kv_format(k_buffer.dtype, arch),
        WIDEN=is_interpreted(_extend_kernel) and q.dtype == torch.bfloat16,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded_head_dim(head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def extend_attention_ref(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    extend_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """`extend_attention` in plain torch, in q's dtype. Returns [T, num_heads, head_dim]."""
    group = q.shape[1] // k_buffer.shape[1]
    out = torch.zeros_like(q)
    starts = extend_start_loc.tolist()
    for b, prefix in enumerate(prefix_lens.tolist()):
        new = slice(starts[b], starts[b + 1])
        q_pos = prefix + torch.arange(starts[b + 1] - starts[b], device=q.device)
        slots = req_to_token[rows[b], : prefix + len(q_pos)].long()
        k_pos = torch.arange(len(slots), device=q.device)
        k = (k_buffer[slots].to(q.dtype) * k_scale).repeat_interleave(group, 1)
        v = (v_buffer[slots].to(q.dtype) * v_scale).repeat_interleave(group, 1)
        scores = torch.einsum("thd,nhd->htn", q[new], k) * sm_scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        seen = k_pos[None, :] <= q_pos[:, None]
        if window is not None:
            seen &= k_pos[None, :] > q_pos[:, None] - window
        scores = scores.masked_fill(~seen, float("-inf"))
        out[new] = torch.einsum("htn,nhd->thd", scores.softmax(-1), v)
    return out
