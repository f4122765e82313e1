"""Triton kernel: applies the token masks of grammars to logits in place (model_executor/sampling/token_mask.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _mask_kernel(x_ptr, lines_ptr, bits_ptr, vocab, num_words, x_stride, BLOCK: tl.constexpr):
    mask_index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_vocab = token < vocab
    line = tl.load(lines_ptr + mask_index).to(tl.int64)
    word = tl.load(bits_ptr + mask_index.to(tl.int64) * num_words + token // 32, mask=in_vocab, other=-1)
    barred = ((word >> (token % 32)) & 1) == 0
    where = x_ptr + line * x_stride + token
    x = tl.load(where, mask=in_vocab & barred, other=0.0)
    # A NaN stays, so that invalid logits are still found.
    tl.store(where, tl.where(x != x, x, float("-inf")), mask=in_vocab & barred)


def apply_masks(x: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor) -> None:
    """Apply masks to some lines of `x`: float32 [n, vocab] (MaskApplication)."""
    vocab = x.shape[1]
    grid = (len(lines), triton.cdiv(vocab, _BLOCK))
    _mask_kernel[grid](x, lines, bits, vocab, bits.shape[1], x.stride(0), BLOCK=_BLOCK)
