"""Random attention problems for tests: requests of different lengths, with their KV scattered over a pool of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from backend_steps import random_sinks
from hypothesis import strategies as st

from tercet.model_executor.kernels.decode_attention import decode_attention, decode_attention_ref
from tercet.model_executor.kernels.extend_attention import extend_attention, extend_attention_ref
from tercet.model_executor.kernels.store_kv import store_kv_ref
from tercet.model_executor.kernels.tuning import DecodeTile, ExtendTile
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map, split_map

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """The drawn parameters. `lens`: tokens of each request; `extend_lens` <= `lens`: new tokens of each request."""

    seed: int
    dtype: torch.dtype
    fp8: bool
    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    lens: tuple[int, ...]
    extend_lens: tuple[int, ...]
    window: int | None
    soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(frozen=True)
class Problem:
    """The tensors of a case. Every unused slot is NaN, and so is every unused element of a strided q."""

    case: Case
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    prefix_lens: torch.Tensor
    q_decode: torch.Tensor
    """[B, num_heads, head_dim]"""
    q_extend: torch.Tensor
    """[sum(extend_lens), num_heads, head_dim]"""
    sinks: torch.Tensor | None

    @property
    def options(self) -> dict[str, float | int | torch.Tensor | None]:
        case = self.case
        scales = {"k_scale": 0.02, "v_scale": 0.03} if case.fp8 else {}
        options = {"sm_scale": case.sm_scale, "soft_cap": case.soft_cap, "window": case.window}
        return {**options, "sinks": self.sinks, **scales}

    def pools64(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k_buffer.double(), self.v_buffer.double()


@st.composite
def cases(draw: st.DrawFn, max_len: int = 80, max_requests: int = 3, max_query_rows: int = 160) -> Case:
    """max_query_rows: new tokens, each with all heads; a single head may have more."""
    extend = []
    lens = draw(st.lists(st.integers(1, max_len), min_size=1, max_size=max_requests))
    for length in lens:
        extend.append(draw(st.sampled_from([1, length, draw(st.integers(1, min(length, 24)))])))
    num_kv_heads = draw(st.integers(1, 2))
    # The interpreter takes milliseconds for each tile, so a case has many heads or many tokens, but not both.
    groups = [g for g in (1, 2, 3, 4, 7, 8, 17) if g * sum(extend) * num_kv_heads <= max_query_rows]
    return Case(
        seed=draw(st.integers(0, 2**31)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        fp8=draw(st.integers(0, 4)) == 4,
        num_kv_heads=num_kv_heads,
        group=draw(st.sampled_from(groups or [1])),
        head_dim=draw(st.sampled_from([64, 80, 96, 128, 192, 256, 16])),
        page_size=draw(st.sampled_from([1, 4, 16, 32])),
        lens=tuple(lens),
        extend_lens=tuple(extend),
        window=draw(st.sampled_from([None, None, 1, 7, 16, 33, 1000])),
        soft_cap=draw(st.sampled_from([None, None, 5.0, 50.0])),
        sm_scale=draw(st.sampled_from([0.05, 0.125, 0.3])),
        has_sinks=draw(st.booleans()),
    )


def build(case: Case, device: str = "cpu") -> Problem:
    g = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(case.dtype)

    page = case.page_size
    pages = [-(-n // page) for n in case.lens]
    context = max(case.lens) + 5
    order = torch.randperm(sum(pages) + 2, generator=g) + 1  # page 0 is the dummy; two pages stay unused
    num_slots = (sum(pages) + 3) * page
    table = torch.zeros(len(case.lens) + 3, context, dtype=torch.int32)
    rows = torch.randperm(len(case.lens) + 2, generator=g)[: len(case.lens)] + 1
    used, taken = [], 0
    for row, n, count in zip(rows, case.lens, pages, strict=True):
        slots = (order[taken : taken + count, None] * page + torch.arange(page)).flatten()[:n]
        table[row, :n] = slots.int()
        table[row, n:] = num_slots + 10**6  # a kernel that uses it reads outside the pool
        used.append(slots)
        taken += count
    shape = (num_slots, case.num_kv_heads, case.head_dim)
    pool_dtype = torch.float8_e4m3fn if case.fp8 else case.dtype
    k_buffer = torch.full(shape, torch.nan).to(pool_dtype)
    v_buffer = k_buffer.clone()
    slots = torch.cat(used)
    scales = {"k_scale": 0.02, "v_scale": 0.03} if case.fp8 else {}
    store_kv_ref(random(len(slots), *shape[1:]), random(len(slots), *shape[1:]), k_buffer, v_buffer, slots, **scales)
    lens, extend_lens = torch.tensor(case.lens), torch.tensor(case.extend_lens)
    starts = torch.nn.functional.pad(extend_lens.cumsum(0), (1, 0))

    def queries(num_tokens: int) -> torch.Tensor:
        """A view of a fused projection whose other heads are NaN."""
        fused = torch.full((num_tokens, case.num_heads + 2 * case.num_kv_heads, case.head_dim), torch.nan)
        fused[:, : case.num_heads] = random(num_tokens, case.num_heads, case.head_dim)
        return fused.to(device, case.dtype)[:, : case.num_heads]

    decode, extend = queries(len(lens)), queries(int(starts[-1]))
    tensors = k_buffer, v_buffer, table, rows, lens, starts, lens - extend_lens
    sinks = random_sinks(case.num_heads, case.seed).to(device) if case.has_sinks else None
    return Problem(case, *(t.to(device) for t in tensors), decode, extend, sinks)


def run_decode(p: Problem, tile: DecodeTile, pick: Sequence[int] | None = None, *, room: int = 0) -> torch.Tensor:
    """Runs the decode kernel for the requests `pick`, in that order; None: for all. room: records without a unit."""
    at = list(range(len(p.case.lens)) if pick is None else pick)
    seq_lens, rows, q = p.seq_lens[at], p.rows[at], p.q_decode[at]
    capacity = int((-(-seq_lens // tile.split)).sum()) + room
    work = split_map(seq_lens, rows, tile.split, capacity)
    out = poisoned(q)
    decode_attention(q, p.k_buffer, p.v_buffer, p.req_to_token, rows, seq_lens, work, out, tile=tile, **p.options)
    return out


def expected_decode(p: Problem) -> torch.Tensor:
    return decode_attention_ref(
        p.q_decode.double(), *p.pools64(), p.req_to_token, p.rows, p.seq_lens, **p.options
    )  # fmt: skip


def run_extend(
    p: Problem,
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
    seq_lens = prefix_lens + extend_lens
    out = poisoned(q)
    kv = p.k_buffer, p.v_buffer, p.req_to_token, rows
    longest = int(seq_lens.max())
    if by_unit:
        units = -(-extend_lens * p.case.group // tile.block_m) * -(-seq_lens // tile.split)
        work = query_split_map(starts, seq_lens, p.case.group, tile.block_m, tile.split, int(units.sum()))
    else:
        work = query_tile_map(starts, p.case.group, tile.block_m, q.shape[0])
    extend_attention(q, *kv, starts, prefix_lens, work, out, longest=longest, tile=tile, **p.options)
    capacity = int((-(-seq_lens // decode_tile.split)).sum())
    splits = split_map(seq_lens, rows, decode_tile.split, capacity, starts)
    decode_attention(q, *kv, seq_lens, splits, out, tile=decode_tile, q_loc=starts[:-1], **p.options)
    return out


def expected_extend(p: Problem) -> torch.Tensor:
    return extend_attention_ref(
        p.q_extend.double(), *p.pools64(), p.req_to_token, p.rows, p.extend_start_loc, p.prefix_lens, **p.options
    )  # fmt: skip


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """An output tensor full of NaN, so that a test notices elements that a kernel did not write."""
    return torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device)


def assert_close(out: torch.Tensor, reference: torch.Tensor, *, tolerance: float | None = None) -> None:
    """Checks the relative error of the norm separately for every leading index. NaN fails.

    tolerance: None: that of the type.
    """
    size = reference.flatten(1).norm(dim=1)
    error = (out.double() - reference).flatten(1).norm(dim=1)
    limit = TOLERANCE[out.dtype] if tolerance is None else tolerance
    assert bool((error <= limit * size).all()), f"relative errors {(error / size).tolist()}"
