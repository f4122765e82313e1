"""Token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..forward_batch import ForwardBatch


class Embedding:
    """ids int64 [T] -> [T, hidden]; weight: [vocab, hidden]. Ids are below vocab, which the caller has checked."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return F.embedding(ids, self.weight)
