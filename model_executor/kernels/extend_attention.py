"""Extend attention: the new tokens of each request attend to its cached prefix and to each other.

Source: FlashAttention-2, https://arxiv.org/abs/2307.08691. The pool already holds the KV of the new tokens. The kernel
reads the KV of the prefix and of the new tokens in the same way, through the table of slots. A query tile is `block_m`
pairs (token, query head) of one request and one KV head. All query heads of the group are in it, so the KV is read once
for them. KV tiles start at multiples of `block_n`, counted from position 0. A KV tile that is masked for a query does
not change the query's sums. So a token's arithmetic does not depend on the chunks of its prompt or on other requests.

Where a page has a multiple of `block_n` slots, a KV tile has consecutive slots, and one look-up finds them (`paged`).
That changes no bits.

The KV is cut into splits of a fixed length, at multiples of `split` counted from position 0. A split's partial softmax
starts from nothing, and the partial results of a token are merged in the order of its splits, one after the other.
There are two ways to do that, with the same bits. Usually the program of a query tile computes its splits in turn, and
keeps the merged result in memory between them. If few query tiles would leave most of the GPU idle, each split is a
work unit of its own, and a second kernel merges the partial results (Flash-Decoding).
"""

from __future__ import annotations

import numpy as np
import torch

from ..step import Int32Array
from .decode_attention import check_sinks, softmax_with_sinks
from .extend_kernels import BY_UNIT, IN_TURN, ONE_SPLIT, extend_kernel, extend_merge_kernel
from .primitives import as_kernel_operand, is_interpreted, kv_format, score_scales
from .tuning import (
    MAX_HEAD_DIM,
    ExtendTile,
    arch_of,
    cdiv,
    extend_tile,
    num_multiprocessors,
    padded_head_dim,
    padded_width,
)
from .work_map import WorkMap, query_split_map, query_tile_map

MERGE_ROWS = 16
"""Rows of a query tile that are merged at a time."""
_MAX_PART_BYTES = 256 << 20
"""Limit of the partial results of splits that are work units, as if for heads of at least MAX_HEAD_DIM components."""


def extend_work(
    extend_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    new_lens_host: Int32Array,
    seq_lens_host: Int32Array,
    num_heads: int,
    num_kv_heads: int,
    tile: ExtendTile,
    value_dim: int = MAX_HEAD_DIM,
) -> WorkMap:
    """The work units of a step: query tiles, or also splits of their KV if the tiles occupy less than half the device.

    extend_start_loc: int [B + 1]; seq_lens: int [B], prefix included. The host's copies: int32 [B], new_lens_host the
    numbers of new tokens. The choice does not change the bits of a result.
    """
    group = num_heads // num_kv_heads
    several = new_lens_host != 1
    tiles = -(-new_lens_host[several].astype(np.int64) * group // tile.block_m)
    splits = -(-seq_lens_host[several] // tile.split)
    units = int((tiles * splits).sum())
    part_bytes = units * _limited_unit_bytes(num_kv_heads, tile, value_dim)
    idle = 2 * int(tiles.sum()) * num_kv_heads <= num_multiprocessors(seq_lens.device)
    if idle and splits.max(initial=1) > 1 and part_bytes <= _MAX_PART_BYTES:
        return query_split_map(extend_start_loc, seq_lens, group, tile.block_m, tile.split, units)
    num_tokens = int(new_lens_host.sum())
    return query_tile_map(extend_start_loc, group, tile.block_m, num_tokens)


def max_part_bytes(device: torch.device, context_len: int, num_kv_heads: int, value_dim: int, tile: ExtendTile) -> int:
    """The most bytes of partial results of a step whose splits are work units, whatever the lengths of its requests.

    Such a step may have few tokens. So the steps that measure memory (runner/warmup.py) need not take as much.
    """
    if context_len <= tile.split:
        return 0
    tiles = num_multiprocessors(device) // (2 * num_kv_heads)
    most = _MAX_PART_BYTES // _limited_unit_bytes(num_kv_heads, tile, value_dim)
    units = min(tiles * cdiv(context_len, tile.split), most)
    # The sums of values, the maximum and the total of each row.
    return units * num_kv_heads * tile.block_m * (padded_width(value_dim) + 2) * 4


def _limited_unit_bytes(num_kv_heads: int, tile: ExtendTile, value_dim: int) -> int:
    """What a work unit counts for _MAX_PART_BYTES."""
    return num_kv_heads * tile.block_m * max(MAX_HEAD_DIM, padded_width(value_dim)) * 4


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
    longest: int,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tile: ExtendTile | None = None,
) -> None:
    """Compute causal attention of each new token t to positions 0 .. p(t) of its request, where p(t) is its position.

    q: [T, num_heads, head_dim], last dimension contiguous. Tokens [extend_start_loc[b], extend_start_loc[b + 1]) belong
    to request b and have positions prefix_lens[b], prefix_lens[b] + 1, ... extend_start_loc: int [B + 1]; rows,
    prefix_lens: int [B]. work: a result of `extend_work`, `query_tile_map` or `query_split_map`. Requests without a
    work unit (those with one new token) get no output. longest: the most tokens of a request with a work unit, its
    prefix included. tile: one that is `paged` needs pages of a multiple of `block_n` slots. Other arguments as in
    `decode_attention`.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    batch = prefix_lens.shape[0]
    check_operands(q, k_buffer, v_buffer, req_to_token, out)
    assert rows.shape == prefix_lens.shape == (batch,)
    assert extend_start_loc.shape == work.starts.shape == (batch + 1,)
    assert window is None or window > 0
    check_sinks(sinks, num_heads)
    fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == q.dtype)

    arch = arch_of(q.device)
    tile = tile or extend_tile(arch, head_dim, fp8, fp32=q.dtype == torch.float32)
    assert work.tile == tile.block_m and tile.split % tile.block_n == 0 and work.split in (None, tile.split)
    group = num_heads // num_kv_heads
    block_d = padded_head_dim(head_dim)
    splits, part_top, part_total, part_o = new_parts(work, longest, tile, num_kv_heads, block_d, q.device)
    extend_kernel[(work.capacity, num_kv_heads)](
        q,
        as_kernel_operand(k_buffer),
        as_kernel_operand(v_buffer),
        req_to_token,
        rows,
        extend_start_loc,
        prefix_lens,
        work.starts,
        work.rows,
        part_top,
        part_total,
        part_o,
        out,
        batch,
        q.stride(0),
        q.stride(1),
        k_buffer.stride(0),
        req_to_token.stride(0),
        *score_scales(sm_scale * k_scale, soft_cap),
        v_scale,
        window or 0,
        part_top if sinks is None else sinks,
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        KV_FORMAT=kv_format(k_buffer.dtype, arch),
        WIDEN=is_interpreted(extend_kernel) and q.dtype == torch.bfloat16,
        PAGED=tile.paged,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        SPLIT=tile.split,
        SPLITS=splits,
        ROWS=MERGE_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if work.split is not None:
        merge_units(
            part_top, part_total, part_o, extend_start_loc, prefix_lens, work, out, num_heads=num_heads, tile=tile,
            window=window, sinks=sinks, v_scale=v_scale,
        )  # fmt: skip


def new_parts(
    work: WorkMap, longest: int, tile: ExtendTile, num_kv_heads: int, width: int, device: torch.device
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The way to compute the splits (SPLITS of the kernel), and memory for the partial results of so many components:
    part_top, part_total and part_o of `merge_units`."""
    splits = BY_UNIT.value if work.split else IN_TURN.value if longest > tile.split else ONE_SPLIT.value
    num_parts = {ONE_SPLIT.value: 0, IN_TURN.value: 2, BY_UNIT.value: 1}[splits] * work.capacity * num_kv_heads
    parts = max(4, num_parts * tile.block_m)  # so that part_total is aligned to 16 bytes, too
    part_top, part_total = torch.empty(2, parts, dtype=torch.float32, device=device)
    return splits, part_top, part_total, torch.empty(parts, width, dtype=torch.float32, device=device)


def check_operands(
    q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, req_to_token: torch.Tensor, out: torch.Tensor
) -> None:
    """Assert the shapes, strides and types that `extend_attention` asks of these arguments."""
    _, num_heads, head_dim = q.shape
    slots, num_kv_heads, _ = k_buffer.shape
    assert q.stride(2) == 1 and out.is_contiguous() and out.shape == q.shape
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous()
    assert k_buffer.shape == v_buffer.shape == (slots, num_kv_heads, head_dim)
    assert num_heads % num_kv_heads == 0
    assert req_to_token.stride(1) == 1 and req_to_token.dtype == torch.int32


def merge_units(
    part_top: torch.Tensor,
    part_total: torch.Tensor,
    part_o: torch.Tensor,
    extend_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    work: WorkMap,
    out: torch.Tensor,
    *,
    num_heads: int,
    tile: ExtendTile,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    v_scale: float = 1.0,
) -> None:
    """Merge the partial results of splits that are work units, and write the results.

    part_top, part_total: float32 [units * block_m], the largest scaled score and the sum of weights of each row of each
    unit; part_o: float32 [units * block_m, padded head_dim], the weighted sums of values. A unit is a work unit of one
    KV head. Other arguments as in `extend_attention`.
    """
    head_dim = out.shape[2]
    num_kv_heads = len(part_o) // (work.capacity * tile.block_m)
    extend_merge_kernel[(work.capacity, num_kv_heads, cdiv(tile.block_m, MERGE_ROWS))](
        part_top,
        part_total,
        part_o,
        extend_start_loc,
        prefix_lens,
        work.starts,
        work.rows,
        out,
        len(prefix_lens),
        v_scale,
        window or 0,
        part_top if sinks is None else sinks,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=part_o.shape[1],
        SPLIT=tile.split,
        ROWS=MERGE_ROWS,
        num_warps=4,
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
    sinks: torch.Tensor | None = None,
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
        out[new] = torch.einsum("htn,nhd->thd", softmax_with_sinks(scores, sinks), v)
    return out
