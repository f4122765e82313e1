"""Applies the token masks of grammars to logits: -inf for every token that may not come next, in place.

A NaN stays, so that invalid logits are still found. Each line depends only on its own mask.
"""

from __future__ import annotations

from typing import Protocol

import torch

_WORD_BITS = 32


class MaskApplication(Protocol):
    def __call__(self, x: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor, /) -> None:
        """Apply masks to some lines of `x`.

        Args:
            x: float32 [n, vocab], contiguous; changed
            lines: int64 [m], lines of x, each once, in rising order
            bits: int32 [m, ceil(vocab / 32)]; bit i of word w is token 32 * w + i
        """


def apply_masks_ref(x: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor) -> None:
    """The twin in plain torch (MaskApplication)."""
    part = x.index_select(0, lines)
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : x.shape[1]].bool()
    x.index_copy_(0, lines, torch.where(allowed, part, part.clamp(max=-torch.inf)))


def apply_masks_on_cpu(x: torch.Tensor, lines: torch.Tensor, bits: torch.Tensor) -> None:
    """A compiled CPU operation (MaskApplication)."""
    torch.ops.tercet_cpu.mask_tokens(x, lines, bits)
