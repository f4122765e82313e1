"""The inputs that each layer of Gemma 4 has for a token beside the residual, and what it makes of them."""

from __future__ import annotations

import math

import torch

from ...srt.model_files.model_config import Activation
from ..forward_batch import ForwardBatch
from .activation import gated_activation
from .layernorm import RMSNorm
from .residual import Layer, NormedSum


class LayerInputs:
    """Makes the inputs of all layers from token ids and their embeddings: int64 [T], [T, hidden] -> [T, layers, n].

    They are the mean, times the square root of 2, of the token's row in a table and of a norm of its projected
    embedding.
    """

    def __init__(self, table: Layer, projection: Layer, norm: RMSNorm) -> None:
        """`table`: ids -> [T, layers * n]. `projection`: [T, hidden] -> [T, layers * n]. `norm`: of n numbers."""
        self._table = table
        self._projection = projection
        self._norm = norm

    def __call__(self, ids: torch.Tensor, embedded: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        width = len(self._norm.weight)
        projected = self._norm(self._projection(embedded, batch).view(-1, width))
        # The rows of the table are multiplied by the square root of n.
        of_tokens = self._table(ids, batch).view(-1, width)
        return projected.add_(of_tokens, alpha=math.sqrt(width)).mul_(math.sqrt(0.5)).view(len(ids), -1, width)


class LayerEnd:
    """The end of a layer: residual += norm(projection(activation(gate(residual)) * inputs)), then the residual is
    multiplied by a factor. Without a gate there is only the factor."""

    def __init__(self, factor: torch.Tensor, gate: Layer | None, projection: NormedSum | None, activation: Activation):
        """`factor`: [1]. It is not copied, because an update may overwrite it."""
        self._factor = factor
        self._gate = gate
        self._projection = projection
        self._activation = activation

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor | None, batch: ForwardBatch) -> None:
        """Change the residual [T, hidden] in place. `inputs`: [T, n], those of the layer; None if it has no gate."""
        if self._gate is not None:
            assert self._projection is not None and inputs is not None
            gated = gated_activation(torch.cat((self._gate(residual, batch), inputs), 1), self._activation)
            self._projection(gated, residual, batch)
        residual.mul_(self._factor)
