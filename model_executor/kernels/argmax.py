"""Greedy choice: the first of the largest logits. It takes two kernels, so that many multiprocessors share a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..step import INVALID_TOKEN
from .bound import bound
from .primitives import has_dense_rows
from .tuning import cdiv, next_power_of_2

_CHUNK = 4096
NO_ID = tl.constexpr(2**31 - 1)
"""More than any token id."""


@triton.jit
def peak_of_chunk(x, i):
    """The largest of the logits x of tokens i, and the first token that has it. With a NaN: +inf, which no other chunk
    exceeds, and -1."""
    has_nan = tl.sum((x != x).to(tl.int32), axis=0) > 0
    x = tl.where(x != x, float("-inf"), x)
    top = tl.max(x, axis=0)
    first = tl.min(tl.where(x == top, i, NO_ID), axis=0)
    return tl.where(has_nan, float("inf"), top), tl.where(has_nan, -1, first)


@bound
@triton.jit
def _argmax_chunk_kernel(x_ptr, part_max_ptr, part_id_ptr, stride_x, vocab, num_chunks, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * stride_x + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    top, first = peak_of_chunk(x, i)
    tl.store(part_max_ptr + row * num_chunks + chunk, top)
    tl.store(part_id_ptr + row * num_chunks + chunk, first)


@bound
@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])  # a view with any alignment
def _argmax_merge_kernel(
    part_max_ptr, part_id_ptr, out_ptr, newest_ptr, rows_ptr, num_chunks, STORE_NEWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    valid = i < num_chunks
    part = tl.load(part_max_ptr + row * num_chunks + i, mask=valid, other=float("-inf"))
    ids = tl.load(part_id_ptr + row * num_chunks + i, mask=valid, other=NO_ID)
    top = tl.max(part, axis=0)
    token = tl.min(tl.where(part == top, ids, NO_ID), axis=0)
    token = tl.where(top == float("-inf"), -1, token)
    tl.store(out_ptr + row, token.to(tl.int64))
    if STORE_NEWEST:
        tl.store(newest_ptr + tl.load(rows_ptr + row), tl.maximum(token, 0).to(tl.int64))


def argmax(
    logits: torch.Tensor, newest_tokens: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """The index of the first of the largest logits of each row: [n, vocab], any float dtype -> int64 [n].

    A row that has a NaN, or only -inf, gives INVALID_TOKEN. The last dimension is contiguous.
    newest_tokens: int64 [num_rows], and rows: int64 [n], contiguous; both or none. If given, the index is also stored
    in newest_tokens[row]; 0 for INVALID_TOKEN.
    """
    n, vocab = logits.shape
    assert has_dense_rows(logits) and 0 < vocab < 2**31 - _CHUNK
    assert (newest_tokens is None) == (rows is None)
    if newest_tokens is not None and rows is not None:
        assert rows.shape == (n,) and rows.is_contiguous() and newest_tokens.is_contiguous()
        assert rows.dtype == newest_tokens.dtype == torch.int64
    num_chunks = cdiv(vocab, _CHUNK)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if not n:
        return out
    part_max = torch.empty((n, num_chunks), dtype=torch.float32, device=logits.device)
    part_id = torch.empty((n, num_chunks), dtype=torch.int32, device=logits.device)
    _argmax_chunk_kernel[(n, num_chunks)](
        logits, part_max, part_id, logits.stride(0), vocab, num_chunks, CHUNK=_CHUNK, num_warps=4
    )
    block = next_power_of_2(num_chunks)
    _argmax_merge_kernel[(n,)](
        part_max, part_id, out, out if newest_tokens is None else newest_tokens, out if rows is None else rows,
        num_chunks, STORE_NEWEST=rows is not None, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out


def argmax_ref(
    logits: torch.Tensor, newest_tokens: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """`argmax` in plain torch."""
    peak = logits.amax(-1)  # NaN if any logit of the row is NaN
    first = (logits == peak[:, None]).int().argmax(-1)
    tokens = first.where(peak > -torch.inf, INVALID_TOKEN)
    if newest_tokens is not None and rows is not None:
        newest_tokens[rows] = tokens.clamp(min=0)
    return tokens
