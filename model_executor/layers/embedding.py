"""The embedding layer: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..forward_batch import ForwardBatch


class Embedding:
    """Look up embeddings: ids int64 [T] -> [T, hidden]; weight: [vocab, hidden]. The caller has checked the ids."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return F.embedding(ids, self.weight)
