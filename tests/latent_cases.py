"""Random problems of latent attention: requests of different lengths, with their keys scattered over a pool of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from attention_cases import poisoned
from hypothesis import strategies as st

from tercet.model_executor.kernels.latent_attention import (
    latent_attention_ref,
    latent_decode_attention,
    latent_extend_attention,
)
from tercet.model_executor.kernels.tuning import DecodeTile, ExtendTile
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map, split_map


@dataclass(frozen=True)
class LatentCase:
    """The drawn parameters. `lens`: tokens of each request; `extend_lens` <= `lens`: new tokens of each request."""

    seed: int
    dtype: torch.dtype
    num_heads: int
    latent_dim: int
    rope_dim: int
    page_size: int
    lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    sm_scale: float = 0.1

    @property
    def head_dim(self) -> int:
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True)
class LatentProblem:
    """The tensors of a case. Every unused slot is NaN, and so is every unused element of a strided q."""

    case: LatentCase
    pool: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    q_decode: torch.Tensor
    """[B, num_heads, head_dim]"""
    q_extend: torch.Tensor
    """[sum(extend_lens), num_heads, head_dim]"""

    @property
    def kv(self) -> tuple[torch.Tensor, int, torch.Tensor]:
        return self.pool, self.case.latent_dim, self.req_to_token


@st.composite
def latent_cases(draw: st.DrawFn, max_len: int = 70, max_requests: int = 3, max_query_rows: int = 160) -> LatentCase:
    """max_query_rows: new tokens, each with all heads; the fewest heads may have more."""
    lens = draw(st.lists(st.integers(1, max_len), min_size=1, max_size=max_requests))
    extend = [draw(st.sampled_from([1, length, draw(st.integers(1, min(length, 12)))])) for length in lens]
    # The interpreter takes milliseconds for each tile, so a case has many heads or many tokens, but not both.
    heads = [n for n in (1, 3, 16, 17, 40) if n * sum(extend) <= max_query_rows]
    latent_dim, rope_dim = draw(st.sampled_from([(32, 16), (32, 8), (24, 16), (16, 2), (64, 32)]))
    return LatentCase(
        seed=draw(st.integers(0, 2**31)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        num_heads=draw(st.sampled_from(heads or [1])),
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=draw(st.sampled_from([1, 4, 16, 32])),
        lens=tuple(lens),
        extend_lens=tuple(extend),
        sm_scale=draw(st.sampled_from([0.05, 0.3])),
    )


def build_latent(case: LatentCase, device: str = "cpu") -> LatentProblem:
    g = torch.Generator().manual_seed(case.seed)
    page = case.page_size
    pages = [-(-n // page) for n in case.lens]
    order = torch.randperm(sum(pages) + 2, generator=g) + 1  # page 0 is the dummy; two pages stay unused
    num_slots = (sum(pages) + 3) * page
    table = torch.zeros(len(case.lens) + 3, max(case.lens) + 5, dtype=torch.int32)
    rows = torch.randperm(len(case.lens) + 2, generator=g)[: len(case.lens)] + 1
    pool = torch.full((num_slots, 1, case.head_dim), torch.nan, dtype=case.dtype)
    taken = 0
    for row, n, count in zip(rows, case.lens, pages, strict=True):
        slots = (order[taken : taken + count, None] * page + torch.arange(page)).flatten()[:n]
        table[row, :n] = slots.int()
        table[row, n:] = num_slots + 10**6  # a kernel that uses it reads outside the pool
        pool[slots] = torch.randn(n, 1, case.head_dim, generator=g).to(case.dtype)
        taken += count

    def queries(num_tokens: int) -> torch.Tensor:
        """A view of a larger tensor whose other components are NaN."""
        wide = torch.full((num_tokens, case.num_heads + 1, case.head_dim + 8), torch.nan, dtype=case.dtype)
        own = wide[:, : case.num_heads, : case.head_dim]
        own.copy_(torch.randn(own.shape, generator=g))
        return wide.to(device)[:, : case.num_heads, : case.head_dim]

    lens, extend_lens = torch.tensor(case.lens), torch.tensor(case.extend_lens)
    tensors = [tensor.to(device) for tensor in (pool, table, rows, lens, extend_lens)]
    return LatentProblem(case, *tensors, queries(len(lens)), queries(sum(case.extend_lens)))


def run_latent_decode(
    p: LatentProblem, tile: DecodeTile, pick: Sequence[int] | None = None, *, room: int = 0
) -> torch.Tensor:
    """Runs the decode kernel for the requests `pick`, in that order; None: for all. room: records without a unit."""
    at = list(range(len(p.case.lens)) if pick is None else pick)
    seq_lens, rows, q = p.seq_lens[at], p.rows[at], p.q_decode[at]
    work = split_map(seq_lens, rows, tile.split, int((-(-seq_lens // tile.split)).sum()) + room)
    out = poisoned(q[..., : p.case.latent_dim])
    latent_decode_attention(q, *p.kv, rows, seq_lens, work, out, sm_scale=p.case.sm_scale, tile=tile)
    return out


def run_latent_extend(
    p: LatentProblem,
    tile: ExtendTile,
    decode_tile: DecodeTile,
    q: torch.Tensor,
    rows: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    by_unit: bool = False,
) -> torch.Tensor:
    """Runs the kernels as the backend does: decode for requests with one new token, extend for the others.

    by_unit: each split of the KV is a work unit.
    """
    starts = torch.nn.functional.pad(extend_lens.cumsum(0), (1, 0))
    seq_lens, heads = prefix_lens + extend_lens, p.case.num_heads
    out = poisoned(q[..., : p.case.latent_dim])
    if by_unit:
        units = -(-extend_lens * heads // tile.block_m) * -(-seq_lens // tile.split)
        work = query_split_map(starts, seq_lens, heads, tile.block_m, tile.split, int(units.sum()))
    else:
        work = query_tile_map(starts, heads, tile.block_m, q.shape[0])
    latent_extend_attention(
        q, *p.kv, rows, starts, prefix_lens, work, out, longest=int(seq_lens.max()), sm_scale=p.case.sm_scale, tile=tile
    )  # fmt: skip
    capacity = int((-(-seq_lens // decode_tile.split)).sum())
    splits = split_map(seq_lens, rows, decode_tile.split, capacity, starts)
    latent_decode_attention(
        q, *p.kv, rows, seq_lens, splits, out, sm_scale=p.case.sm_scale, tile=decode_tile, q_loc=starts[:-1]
    )  # fmt: skip
    return out


def expected_latent(p: LatentProblem, *, decode: bool) -> torch.Tensor:
    """The outputs in float64. decode: of the queries of decoding, else of those of extending."""
    new = torch.ones_like(p.extend_lens) if decode else p.extend_lens
    starts = torch.nn.functional.pad(new.cumsum(0), (1, 0))
    q = p.q_decode if decode else p.q_extend
    pool, latent_dim, table = p.kv
    return latent_attention_ref(
        q.double(), pool.double(), latent_dim, table, p.rows, starts, p.seq_lens - new, sm_scale=p.case.sm_scale
    )  # fmt: skip
