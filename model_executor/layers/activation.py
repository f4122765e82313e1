"""The gated activations of feed-forward layers (GLU variants, arXiv 2002.05202) in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...srt.model_files.experts_config import ClampedGate
from ...srt.model_files.model_config import Activation


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
