"""The log-softmax of rows of logits at given tokens. It takes two kernels, so that many multiprocessors share a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import has_dense_rows
from .tuning import cdiv, next_power_of_2

_CHUNK = 4096
_IDS = 128


@bound
@triton.jit(do_not_specialize_on_alignment=["lines_ptr"])  # a view with any alignment
def _chunk_kernel(x_ptr, lines_ptr, part_max_ptr, part_sum_ptr, stride_x, vocab, num_chunks, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    line = tl.load(lines_ptr + row)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + line * stride_x + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    has_nan = tl.sum((x != x).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    # A chunk of -inf has the sum 0 and not NaN.
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    tl.store(part_max_ptr + row * num_chunks + chunk, top)
    tl.store(part_sum_ptr + row * num_chunks + chunk, tl.where(has_nan, float("nan"), total))


@bound
@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["lines_ptr"])
def _gather_kernel(
    x_ptr, lines_ptr, ids_ptr, part_max_ptr, part_sum_ptr, out_ptr, stride_x, num_ids, num_chunks, BLOCK: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = tl.load(lines_ptr + row)
    i = tl.arange(0, BLOCK)
    valid = i < num_chunks
    part_max = tl.load(part_max_ptr + row * num_chunks + i, mask=valid, other=float("-inf"))
    part_sum = tl.load(part_sum_ptr + row * num_chunks + i, mask=valid, other=0.0)
    top = tl.max(part_max, axis=0)
    total = tl.sum(tl.where(valid, part_sum * tl.exp(part_max - top), 0.0), axis=0)
    j = tl.program_id(1) * IDS + tl.arange(0, IDS)
    wanted = j < num_ids
    ids = tl.load(ids_ptr + row * num_ids + j, mask=wanted, other=0)
    x = tl.load(x_ptr + line * stride_x + ids, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_ids + j, (x - top) - tl.log(total), mask=wanted)


def token_logprobs(logits: torch.Tensor, lines: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log probabilities of tokens: float32 [n, m].

    A row that has a NaN, or only -inf, gives NaN.

    Args:
        logits: [rows, vocab], any float dtype, with a contiguous last dimension
        lines: int64 [n], lines of `logits`
        ids: int64 [n, m], token ids, m >= 1
    """
    n, num_ids = ids.shape
    vocab = logits.shape[1]
    assert has_dense_rows(logits) and ids.is_contiguous() and 0 < vocab < 2**31 - _CHUNK and num_ids > 0
    out = torch.empty((n, num_ids), dtype=torch.float32, device=logits.device)
    if not n:
        return out
    num_chunks = cdiv(vocab, _CHUNK)
    part_max = torch.empty((n, num_chunks), dtype=torch.float32, device=logits.device)
    part_sum = torch.empty_like(part_max)
    _chunk_kernel[(n, num_chunks)](
        logits, lines, part_max, part_sum, logits.stride(0), vocab, num_chunks, CHUNK=_CHUNK, num_warps=4
    )
    block = next_power_of_2(num_chunks)
    _gather_kernel[(n, cdiv(num_ids, _IDS))](
        logits, lines, ids, part_max, part_sum, out, logits.stride(0), num_ids, num_chunks, BLOCK=block, IDS=_IDS,
        num_warps=1,
    )  # fmt: skip
    return out


def token_logprobs_ref(logits: torch.Tensor, lines: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`token_logprobs` in plain torch."""
    x = logits.index_select(0, lines).float()
    peak = x.amax(dim=-1, keepdim=True)
    return x.gather(1, ids).sub_(peak).sub_((x - peak).exp_().sum(dim=-1, keepdim=True).log_())
