"""From hidden states to the logits that somebody wants."""

from __future__ import annotations

import torch

from .forward_batch import ForwardBatch
from .layers.kinds import Layer


class LogitsProcessor:
    """Only the tokens at `batch.logits_indices` go through the head: it is the largest matrix of a small model."""

    def __init__(self, lm_head: Layer) -> None:
        self.lm_head = lm_head

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [T, hidden_size] -> float32 logits [num_sampled, vocab], in `out` where that is given"""
        if batch.logits_indices is not None:
            hidden = hidden[batch.logits_indices]
        logits = self.lm_head(hidden)
        return logits.float() if out is None else out.copy_(logits)
