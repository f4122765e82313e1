"""Attention with gates: sigmoids of linear functions of the layer's input, of each head or each component of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..forward_batch import ForwardBatch


class HeadGates:
    """Attention on the outputs of the first linear layer, whose last columns are the gates: [T, n + gates]."""

    def __init__(
        self,
        attention: Callable[[torch.Tensor, Any, ForwardBatch], torch.Tensor],
        num_gates: int,
        multiply: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """`num_gates`: as many as attention has heads (LFM3), or outputs (Qwen 3.5). `multiply`: as `gate_heads`."""
        self._attention = attention
        self._num_gates = num_gates
        self._multiply = multiply

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        qkv, gates = projected.split((projected.shape[1] - self._num_gates, self._num_gates), 1)
        out = self._attention(qkv, rotation, batch)
        self._multiply(out, gates)
        return out


def gate_heads(x: torch.Tensor, gates: torch.Tensor) -> None:
    """Multiply the parts of x [T, gates * n] by the sigmoids of gates [T, gates], in place, rounded once."""
    x.unflatten(1, (gates.shape[1], -1)).mul_(gates.float().sigmoid()[..., None])
