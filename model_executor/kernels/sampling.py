"""Sampling with temperature, top-k, top-p and min-p, by inversion of the cumulative distribution, without a sort.

The semantics are those of model_executor/sampling/joint_sampling.py. Each threshold is computed on the whole
distribution after temperature, and a token must pass all filters. The kept tokens are renormalised, and the draw
inverts their cumulative distribution: over the ranks with top-k or top-p (a "ranked" row), else over the ids (an
"open" row).
A token's weight is its probability as an integer, in units of 2**-34 of the best token's probability. Sums of weights
are exact, so neither the order of programs nor the division of the vocabulary among them changes a token.

gap_search.py says what gaps, their bits and buckets are. One step takes five launches for any number of rows and any
vocabulary:

1. edit (logit_edits.py): edits, and the largest logit of each chunk
2. weigh: the weights of each chunk, and for ranked rows histograms of weights and of tokens over buckets of gaps
3. limit: the first bucket in which a filter ends
4. gather: the tokens up to the end of that bucket. Usually they are few. A row with too many searches the vocabulary
5. choose: one program for each row finds the thresholds by bisection, draws the token and counts it

Without ranked rows, 3 and 4 are left out; with only greedy rows, 2 to 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .gap_search import WEIGHTLESS, bucket_end, bucket_of, draw_by_id, draw_by_rank, gaps_of, mass_of, weigh
from .logit_edits import CHUNK, EditTables, edit_logits
from .primitives import has_dense_rows
from .sampling_layout import Column, Field
from .tuning import cdiv, next_power_of_2

_BLOCK = 2048
"""Tokens that a program of the last kernel reads at a time."""
_CANDIDATES = 4096
"""Room for the gathered tokens of a row."""
_NUM_BUCKETS = 1024
_NEVER = tl.constexpr(2**31 - 1)
_COLUMNS = tl.constexpr(len(Column))
_FIELDS = tl.constexpr(len(Field))
_ROW, _DRAW, _COUNTS, _EDITED = (
    tl.constexpr(int(field)) for field in (Field.ROW, Field.DRAW, Field.COUNTS, Field.EDITED)
)
_TEMPERATURE, _TOP_K, _TOP_P, _MAX_GAP, _GREEDY = (
    tl.constexpr(int(column))
    for column in (Column.TEMPERATURE, Column.TOP_K, Column.TOP_P, Column.MAX_GAP, Column.GREEDY)
)


@triton.jit
def _line_of(plan, line, x_ptr, edited_ptr, stride_x, vocab):
    """The address of a line's logits, edited or not."""
    edited = tl.load(plan + _EDITED)
    return tl.where(edited >= 0, edited_ptr + edited * vocab, x_ptr + line * stride_x)


@triton.jit
def _peak(peak_ptr, peak_id_ptr, line, num_chunks, PARTS: tl.constexpr):
    """(best logit, its first token) of a line. The token is -1 if the line has a NaN, or only -inf.

    The logit is finite, and 0.0 if it is -0.0, because a gap of -0.0 would have the wrong bits.
    """
    part = tl.arange(0, PARTS)
    valid = part < num_chunks
    values = tl.load(peak_ptr + line * num_chunks + part, mask=valid, other=float("-inf"))
    ids = tl.load(peak_id_ptr + line * num_chunks + part, mask=valid, other=_NEVER)
    top = tl.max(values, axis=0)
    token = tl.min(tl.where(values == top, ids, _NEVER), axis=0)
    best = tl.where(top == 0.0, 0.0, tl.minimum(top, 3.4028234663852886e38))
    return best, tl.where(top == float("-inf"), -1, token)


@triton.jit
def _last_gap(params):
    """The bits of the largest gap that min-p keeps and that has a weight."""
    max_gap = tl.load(params + _MAX_GAP).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(max_gap, WEIGHTLESS)


@triton.jit
def _bucket_weights(buckets_ptr, line, BUCKETS: tl.constexpr):
    """The int64 weights of a line's buckets, at the start of its int32 [3 * BUCKETS]."""
    return (buckets_ptr + line * 3 * BUCKETS).to(tl.pointer_type(tl.int64))


@triton.jit
def _bucket_counts(buckets_ptr, line, BUCKETS: tl.constexpr):
    """The int32 counts of a line's buckets, after their weights."""
    return buckets_ptr + line * 3 * BUCKETS + 2 * BUCKETS


@bound
@triton.jit
def _weigh_kernel(
    x_ptr, table_ptr, plan_ptr, edited_ptr, peak_ptr, peak_id_ptr, sum_ptr, buckets_ptr, stride_x, vocab, num_chunks,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    plan = plan_ptr + line * _FIELDS
    params = table_ptr + tl.load(plan + _ROW) * _COLUMNS
    if tl.load(params + _GREEDY) == 0.0:
        top_k = tl.load(params + _TOP_K).to(tl.int32)
        top_p = tl.load(params + _TOP_P)
        by_rank = (top_k < vocab) | (top_p < 1.0)
        last = _last_gap(params)
        best, _ = _peak(peak_ptr, peak_id_ptr, line, num_chunks, PARTS)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(_line_of(plan, line, x_ptr, edited_ptr, stride_x, vocab) + i, mask=i < vocab, other=float("-inf"))
        gap = gaps_of(x, best, tl.load(params + _TEMPERATURE).to(tl.float32))
        bits = gap.to(tl.int32, bitcast=True)
        # Top-p is a share of the weight of the whole vocabulary, before min-p.
        weights = tl.where((bits <= tl.where(by_rank, WEIGHTLESS, last)) & (i < vocab), weigh(gap), 0)
        tl.store(sum_ptr + line * num_chunks + chunk, tl.sum(weights, axis=0))
        if by_rank:
            bucket = bucket_of(bits)
            near = (bits <= last) & (i < vocab)
            if top_p < 1.0:
                tl.atomic_add(_bucket_weights(buckets_ptr, line, BUCKETS) + bucket, weights, mask=near, sem="relaxed")
            if top_k < vocab:
                tl.atomic_add(_bucket_counts(buckets_ptr, line, BUCKETS) + bucket, 1, mask=near, sem="relaxed")


@bound
@triton.jit
def _limit_kernel(
    table_ptr, plan_ptr, peak_ptr, peak_id_ptr, sum_ptr, buckets_ptr, limit_ptr, found_ptr, vocab, num_chunks,
    PARTS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    params = table_ptr + tl.load(plan_ptr + line * _FIELDS + _ROW) * _COLUMNS
    top_k = tl.load(params + _TOP_K).to(tl.int32)
    top_p = tl.load(params + _TOP_P)
    limit = top_k * 0 - 1
    _, token = _peak(peak_ptr, peak_id_ptr, line, num_chunks, PARTS)
    if (token >= 0) & (tl.load(params + _GREEDY) == 0.0) & ((top_k < vocab) | (top_p < 1.0)):
        last = _last_gap(params)
        buckets = tl.arange(0, BUCKETS)
        bucket = bucket_of(last)
        if top_k < vocab:
            counts = tl.cumsum(tl.load(_bucket_counts(buckets_ptr, line, BUCKETS) + buckets), axis=0)
            bucket = tl.minimum(bucket, tl.min(tl.where(counts >= top_k, buckets, BUCKETS), axis=0))
        if top_p < 1.0:
            part = tl.arange(0, PARTS)
            sums = tl.load(sum_ptr + line * num_chunks + part, mask=part < num_chunks, other=0)
            weights = tl.cumsum(tl.load(_bucket_weights(buckets_ptr, line, BUCKETS) + buckets), axis=0)
            reached = weights >= mass_of(tl.sum(sums, axis=0), top_p)
            bucket = tl.minimum(bucket, tl.min(tl.where(reached, buckets, BUCKETS), axis=0))
        limit = tl.minimum(bucket_end(bucket), last)
    tl.store(limit_ptr + line, limit)
    tl.store(found_ptr + line, 0)


@bound
@triton.jit
def _gather_kernel(
    x_ptr, table_ptr, plan_ptr, edited_ptr, peak_ptr, peak_id_ptr, limit_ptr, found_ptr, gap_ptr, id_ptr, stride_x,
    vocab, num_chunks, CHUNK: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    limit = tl.load(limit_ptr + line)
    if limit >= 0:
        plan = plan_ptr + line * _FIELDS
        params = table_ptr + tl.load(plan + _ROW) * _COLUMNS
        best, _ = _peak(peak_ptr, peak_id_ptr, line, num_chunks, PARTS)
        i = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(_line_of(plan, line, x_ptr, edited_ptr, stride_x, vocab) + i, mask=i < vocab, other=float("-inf"))
        gap = gaps_of(x, best, tl.load(params + _TEMPERATURE).to(tl.float32))
        near = ((gap.to(tl.int32, bitcast=True) <= limit) & (i < vocab)).to(tl.int32)
        count = tl.sum(near, axis=0)
        if count > 0:
            # Programs come in any order, and so do the candidates.
            place = tl.atomic_add(found_ptr + line, count, sem="relaxed") + tl.cumsum(near, axis=0) - 1
            fits = (near == 1) & (place < CANDIDATES)
            tl.store(gap_ptr + line * CANDIDATES + place, gap, mask=fits)
            tl.store(id_ptr + line * CANDIDATES + place, i, mask=fits)


@bound
@triton.jit
def _choose_kernel(
    x_ptr, table_ptr, plan_ptr, edited_ptr, token_counts_ptr, peak_ptr, peak_id_ptr, sum_ptr, limit_ptr, found_ptr,
    gap_ptr, id_ptr, out_ptr, newest_ptr, stride_x, vocab, num_chunks, STORE_NEWEST: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    plan = plan_ptr + line * _FIELDS
    row = tl.load(plan + _ROW)
    params = table_ptr + row * _COLUMNS
    best, token = _peak(peak_ptr, peak_id_ptr, line, num_chunks, PARTS)
    if (token >= 0) & (tl.load(params + _GREEDY) == 0.0):
        values = _line_of(plan, line, x_ptr, edited_ptr, stride_x, vocab)
        sums = sum_ptr + line * num_chunks
        temperature = tl.load(params + _TEMPERATURE).to(tl.float32)
        top_k = tl.load(params + _TOP_K).to(tl.int32)
        top_p = tl.load(params + _TOP_P)
        draw = tl.load(plan + _DRAW).to(tl.float64, bitcast=True)
        if (top_k < vocab) | (top_p < 1.0):
            limit = tl.load(limit_ptr + line)
            found = tl.load(found_ptr + line)
            part = tl.arange(0, PARTS)
            mass = mass_of(tl.sum(tl.load(sums + part, mask=part < num_chunks, other=0), axis=0), top_p)
            if found <= CANDIDATES:
                token = draw_by_rank(
                    gap_ptr + line * CANDIDATES, id_ptr + line * CANDIDATES, found, limit, top_k, mass, draw, best,
                    temperature, True, BLOCK,
                )  # fmt: skip
            else:
                token = draw_by_rank(
                    values, id_ptr, vocab, limit, top_k, mass, draw, best, temperature, False, BLOCK
                )  # fmt: skip
        else:
            last = _last_gap(params)
            token = draw_by_id(values, sums, last, draw, best, temperature, vocab, num_chunks, CHUNK, PARTS)
    tl.store(out_ptr + line, token.to(tl.int64))
    if STORE_NEWEST:
        tl.store(newest_ptr + row, tl.maximum(token, 0).to(tl.int64))
    counts_line = tl.load(plan + _COUNTS)
    if (counts_line >= 0) & (token >= 0):
        count = token_counts_ptr + counts_line * vocab + token
        tl.store(count, tl.load(count) + 2)


class _Work(NamedTuple):
    """What the kernels find out about n lines before the choice."""

    sums: torch.Tensor
    """int64 [n, num_chunks], weights"""
    buckets: torch.Tensor
    """int32 [n, 3 * _NUM_BUCKETS]: int64 weights of the buckets, then int32 counts of their tokens"""
    limit: torch.Tensor
    """int32 [n], bits of a gap; -1: the line is not ranked"""
    found: torch.Tensor
    """int32 [n], the number of tokens with gaps of at most the limit"""
    gaps: torch.Tensor
    """float32 [n, candidates], of these tokens in any order"""
    ids: torch.Tensor
    """int32 [n, candidates]"""


def choose_tokens(
    logits: torch.Tensor,
    table: torch.Tensor,
    plan: torch.Tensor,
    edits: EditTables,
    *,
    num_edited: int,
    any_sampled: bool,
    any_ranked: bool,
    newest_tokens: torch.Tensor | None = None,
    num_candidates: int = _CANDIDATES,
) -> torch.Tensor:
    """Edit the logits and choose a token of each line: int64 [n], or -1 if its logits have a NaN or are all -inf.

    Counts the token in `edits.counts`, if the line has counts. The logits are not changed.

    Args:
        logits: float32 [n, vocab], n > 0, last dimension contiguous, vocab at most 2**19 (sums stay below 2**53)
        table: float64 [*, columns], contiguous: the parameters, see Column
        plan: int64 [n, fields], contiguous, see Field
        edits: the tables of the edits
        num_edited: the number of lines with Field.EDITED, which count from 0
        any_sampled: whether a line is not greedy
        any_ranked: whether a line that is not greedy has top-k or top-p
        newest_tokens: int64 [num_rows], contiguous. If given, the token of a line is also stored for its row; 0 for -1
        num_candidates: room for the gathered tokens of a line. A line that needs more searches the whole vocabulary,
            with the same result
    """
    n, vocab = logits.shape
    assert logits.dtype == torch.float32 and has_dense_rows(logits) and 0 < vocab <= 2**19
    assert plan.shape == (n, len(Field)) and plan.dtype == torch.int64 and plan.is_contiguous()
    assert table.shape[1] == len(Column) and table.dtype == torch.float64 and table.is_contiguous()
    assert newest_tokens is None or (newest_tokens.dtype == torch.int64 and newest_tokens.is_contiguous())
    num_chunks = cdiv(vocab, CHUNK)
    work = _allocate(num_chunks, n if any_sampled else 0, n if any_ranked else 0, num_candidates, logits.device)
    edited, *peaks = edit_logits(logits, table, plan, edits, num_edited, work.buckets)
    parts = next_power_of_2(num_chunks)
    if any_sampled:
        _weigh_kernel[(n, num_chunks)](
            logits, table, plan, edited, *peaks, work.sums, work.buckets, logits.stride(0), vocab, num_chunks,
            CHUNK=CHUNK, PARTS=parts, BUCKETS=_NUM_BUCKETS, num_warps=8,
        )  # fmt: skip
    if any_ranked:
        _limit_kernel[(n,)](
            table, plan, *peaks, work.sums, work.buckets, work.limit, work.found, vocab, num_chunks, PARTS=parts,
            BUCKETS=_NUM_BUCKETS, num_warps=4,
        )  # fmt: skip
        _gather_kernel[(n, num_chunks)](
            logits, table, plan, edited, *peaks, work.limit, work.found, work.gaps, work.ids, logits.stride(0), vocab,
            num_chunks, CHUNK=CHUNK, PARTS=parts, CANDIDATES=num_candidates, num_warps=8,
        )  # fmt: skip
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    _choose_kernel[(n,)](
        logits, table, plan, edited, edits.counts, *peaks, work.sums, work.limit, work.found, work.gaps, work.ids, out,
        out if newest_tokens is None else newest_tokens, logits.stride(0), vocab, num_chunks,
        STORE_NEWEST=newest_tokens is not None, CHUNK=CHUNK, PARTS=parts, CANDIDATES=num_candidates, BLOCK=_BLOCK,
        num_warps=16,
    )  # fmt: skip
    return out


def _allocate(num_chunks: int, num_sampled: int, num_ranked: int, num_candidates: int, device: torch.device) -> _Work:
    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return _Work(
        sums=empty(torch.int64, num_sampled, num_chunks),
        buckets=empty(torch.int32, num_ranked, 3 * _NUM_BUCKETS),
        limit=empty(torch.int32, num_ranked),
        found=empty(torch.int32, num_ranked),
        gaps=empty(torch.float32, num_ranked, num_candidates),
        ids=empty(torch.int32, num_ranked, num_candidates),
    )
