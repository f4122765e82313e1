"""The activations of feed-forward layers in plain torch: gated ones (GLU variants, arXiv 2002.05202), and squared ReLU
(arXiv 2109.08668)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...srt.model_files.experts_config import ClampedGate
from ...srt.model_files.model_config import Activation
from ..forward_batch import ForwardBatch
from .residual import Layer


def gated_activation(gate_up: torch.Tensor, activation: Activation | ClampedGate) -> torch.Tensor:
    """Compute activation(first half) * second half: [T, 2 * n] -> [T, n].

    With a ClampedGate, what it describes. This overwrites gate_up.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedGate):
        alpha, limit = activation
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit).add_(1)
        return (alpha * gate).sigmoid_().mul_(gate).mul_(up)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


def square_relu(x: torch.Tensor) -> None:
    """Replace each number by the square of max(x, 0)."""
    x.relu_().square_()


class SquaredReLU:
    """A linear layer with the squared ReLU of its outputs."""

    def __init__(self, linear: Layer, square: Callable[[torch.Tensor], None] = square_relu) -> None:
        """`square`: does what `square_relu` does."""
        self._linear = linear
        self._square = square

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        out = self._linear(x, batch)
        self._square(out)
        return out
