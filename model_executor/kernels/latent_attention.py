"""Latent attention (MLA): one KV head serves all query heads, and a token's value is a part of its key.

Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434, in the absorbed form. A key has `latent_dim` components that are
also the value, and behind them some that are rotated (DeepSeek: 512 + 64). So the pool holds keys only. A KV tile is
read once, as two tensors whose widths are powers of two: the scores are the sum of two products, and the latent part
is also the other operand of the product with the weights.

The work units, splits and merges are those of decode_attention.py and extend_attention.py, with the same promises: the
bits of a token do not depend on the other requests of the batch, on chunks or on cached prefixes.
"""

from __future__ import annotations

import torch

from .decode_attention import merge_parts, note_registers, num_programs
from .extend_attention import MERGE_ROWS, merge_units, new_parts
from .latent_kernels import latent_decode_kernel, latent_extend_kernel
from .primitives import LOG2_E, is_interpreted
from .tuning import DecodeTile, ExtendTile, arch_of, cdiv, next_power_of_2
from .work_map import WorkMap

_MIN_WIDTH = 16
"""tl.dot needs at least as many rows and components."""


def latent_decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    latent_dim: int,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    work: WorkMap,
    out: torch.Tensor,
    *,
    sm_scale: float,
    tile: DecodeTile,
    q_loc: torch.Tensor | None = None,
) -> None:
    """Compute out[b] = softmax(q[b] @ K_b * sm_scale) @ V_b over the KV of each request b.

    q: [T, num_heads, head_dim], last dimension contiguous. pool: keys [slots, 1, head_dim], contiguous, of q's dtype;
    the values are their first `latent_dim` components. out: [T, num_heads, latent_dim], contiguous. Other arguments as
    in `decode_attention`.
    """
    num_tokens, num_heads, head_dim = q.shape
    batch = seq_lens.shape[0]
    _check_operands(q, pool, latent_dim, req_to_token, out)
    assert rows.shape == seq_lens.shape == (batch,) and work.starts.shape == (batch + 1,)
    assert q_loc is not None or num_tokens == batch
    assert work.tile == tile.split and tile.split % tile.block_n == 0 and work.records is not None

    arch = arch_of(q.device)
    block_h = min(max(_MIN_WIDTH, next_power_of_2(num_heads)), tile.max_heads)
    head_blocks = cdiv(num_heads, block_h)
    kind = ("latent", arch, tile, q.dtype, head_dim, latent_dim, num_heads, q_loc is None)
    programs = num_programs(kind, q.device, tile, head_blocks)
    part_o = torch.empty(work.capacity, num_heads, latent_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(work.capacity, num_heads, dtype=torch.float32, device=q.device)
    compiled = latent_decode_kernel[(head_blocks, min(programs, work.capacity))](
        q, pool, req_to_token, rows if q_loc is None else q_loc, work.starts, work.records, part_o, part_lse, batch,
        q.stride(0), q.stride(1), req_to_token.stride(0), sm_scale * LOG2_E,
        NUM_HEADS=num_heads, LATENT_DIM=latent_dim, ROPE_DIM=head_dim - latent_dim, HAS_Q_LOC=q_loc is not None,
        WIDEN=is_interpreted(latent_decode_kernel) and q.dtype == torch.bfloat16, PAGED=tile.paged, SPLIT=tile.split,
        BLOCK_H=block_h, BLOCK_N=tile.block_n, BLOCK_L=_width(latent_dim), BLOCK_R=_width(head_dim - latent_dim),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    note_registers(kind, arch, tile, compiled)
    merge_parts(part_o, part_lse, seq_lens, rows, work, out, q_loc=q_loc)


def latent_extend_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    latent_dim: int,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    extend_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    work: WorkMap,
    out: torch.Tensor,
    *,
    longest: int,
    sm_scale: float,
    tile: ExtendTile,
) -> None:
    """Compute causal attention of each new token t to positions 0 .. p(t) of its request, where p(t) is its position.

    q, pool, latent_dim and out as in `latent_decode_attention`, other arguments as in `extend_attention`.
    """
    _, num_heads, head_dim = q.shape
    batch = prefix_lens.shape[0]
    _check_operands(q, pool, latent_dim, req_to_token, out)
    assert rows.shape == prefix_lens.shape == (batch,)
    assert extend_start_loc.shape == work.starts.shape == (batch + 1,)
    assert work.tile == tile.block_m and tile.split % tile.block_n == 0 and work.split in (None, tile.split)

    width = _width(latent_dim)
    splits, part_top, part_total, part_o = new_parts(work, longest, tile, 1, width, q.device)
    latent_extend_kernel[(work.capacity,)](
        q, pool, req_to_token, rows, extend_start_loc, prefix_lens, work.starts, work.rows, part_top, part_total,
        part_o, out, batch, q.stride(0), q.stride(1), req_to_token.stride(0), sm_scale * LOG2_E,
        NUM_HEADS=num_heads, LATENT_DIM=latent_dim, ROPE_DIM=head_dim - latent_dim,
        WIDEN=is_interpreted(latent_extend_kernel) and q.dtype == torch.bfloat16, PAGED=tile.paged,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_L=width, BLOCK_R=_width(head_dim - latent_dim),
        SPLIT=tile.split, SPLITS=splits, ROWS=MERGE_ROWS, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if work.split is not None:
        merge_units(
            part_top, part_total, part_o, extend_start_loc, prefix_lens, work, out, num_heads=num_heads, tile=tile
        )  # fmt: skip


def _width(num_components: int) -> int:
    """The width of a tile of so many components."""
    return max(_MIN_WIDTH, next_power_of_2(num_components))


def _check_operands(
    q: torch.Tensor, pool: torch.Tensor, latent_dim: int, req_to_token: torch.Tensor, out: torch.Tensor
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    assert 0 < latent_dim < head_dim
    assert q.stride(2) == 1 and out.is_contiguous() and out.shape == (num_tokens, num_heads, latent_dim)
    assert pool.is_contiguous() and pool.shape[1:] == (1, head_dim) and pool.dtype == q.dtype == out.dtype
    assert req_to_token.stride(1) == 1 and req_to_token.dtype == torch.int32


def latent_attention_ref(
    q: torch.Tensor,
    pool: torch.Tensor,
    latent_dim: int,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    extend_start_loc: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    sm_scale: float,
) -> torch.Tensor:
    """Both functions in plain torch, in q's dtype, for any number of new tokens. Returns [T, num_heads, latent_dim]."""
    out = q.new_zeros(*q.shape[:2], latent_dim)
    starts = extend_start_loc.tolist()
    for b, prefix in enumerate(prefix_lens.tolist()):
        new = slice(starts[b], starts[b + 1])
        q_pos = prefix + torch.arange(starts[b + 1] - starts[b], device=q.device)
        slots = req_to_token[rows[b], : prefix + len(q_pos)].long()
        keys = pool[slots, 0].to(q.dtype)
        scores = torch.einsum("thd,nd->htn", q[new], keys) * sm_scale
        seen = torch.arange(len(slots), device=q.device)[None, :] <= q_pos[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[new] = torch.einsum("htn,nd->thd", weights, keys[:, :latent_dim])
    return out
