"""Log probabilities of given tokens, in one pass over the logits. The softmax is not stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .primitives import has_dense_rows

_BLOCK = 4096


@triton.jit(do_not_specialize=["num_tokens"])
def _logprobs_kernel(
    x_ptr, tokens_ptr, out_ptr, stride_x, vocab, num_tokens, BLOCK: tl.constexpr, TOKENS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(x_ptr + row * stride_x + start + i, mask=start + i < vocab, other=float("-inf")).to(tl.float32)
        # Each lane keeps its own running sum, so there is one reduction at the end instead of one per block.
        new_top = tl.where((x > top) | (x != x), x, top)
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - pivot) + tl.exp(x - pivot)
        top = new_top
    peak = tl.max(top, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    lse = shift + tl.log(tl.sum(total * tl.exp(top - shift), axis=0))
    t = tl.arange(0, TOKENS)
    token = tl.load(tokens_ptr + row * num_tokens + t, mask=t < num_tokens, other=0)
    chosen = tl.load(x_ptr + row * stride_x + token, mask=t < num_tokens, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_tokens + t, chosen - lse, mask=t < num_tokens)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute log_softmax(logits) at `tokens`: float32 [n, k]. A row with a NaN gives NaN.

    logits: [n, vocab], any float dtype, last dimension contiguous; tokens: int64 [n, k], contiguous.
    """
    n, vocab = logits.shape
    k = tokens.shape[1]
    assert has_dense_rows(logits) and tokens.shape == (n, k) and tokens.is_contiguous()
    out = torch.empty((n, k), dtype=torch.float32, device=logits.device)
    if n and k:
        _logprobs_kernel[(n,)](
            logits,
            tokens,
            out,
            logits.stride(0),
            vocab,
            k,
            BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
            TOKENS=triton.next_power_of_2(k),
            num_warps=8,
        )
    return out


def logprobs_ref(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`logprobs` in plain torch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.log_softmax(-1).gather(1, tokens)
