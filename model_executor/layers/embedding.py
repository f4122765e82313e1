"""The embedding layer: token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..forward_batch import ForwardBatch
from .residual import Layer


class Embedding:
    """Look up embeddings: ids int64 [T] -> [T, hidden]; weight: [vocab, hidden]. The caller has checked the ids."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class ScaledEmbedding:
    """An embedding whose vectors are multiplied by a factor."""

    def __init__(self, embedding: Layer, factor: float) -> None:
        self.embedding = embedding
        self.factor = factor

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self.embedding(ids, batch).mul_(self.factor)
