"""Attention whose heads have gates (LFM3): sigmoids of linear functions of the layer's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..forward_batch import ForwardBatch


class HeadGates:
    """Attention on the outputs of the first linear layer, whose last columns are the gates: [T, n + heads]."""

    def __init__(
        self,
        attention: Callable[[torch.Tensor, Any, ForwardBatch], torch.Tensor],
        num_heads: int,
        multiply: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """`multiply`: as `gate_heads`."""
        self._attention = attention
        self._num_heads = num_heads
        self._multiply = multiply

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        qkv, gates = projected.split((projected.shape[1] - self._num_heads, self._num_heads), 1)
        out = self._attention(qkv, rotation, batch)
        self._multiply(out, gates)
        return out


def gate_heads(x: torch.Tensor, gates: torch.Tensor) -> None:
    """Multiply the heads of x [T, heads * head_dim] by the sigmoids of gates [T, heads], in place, rounded once."""
    x.unflatten(1, (gates.shape[1], -1)).mul_(gates.float().sigmoid()[..., None])
