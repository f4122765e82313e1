"""The gated activations of feed-forward layers (GLU variants, arXiv 2002.05202) in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...srt.model_files.experts_config import ClampedGate
from ...srt.model_files.model_config import Activation


def gated_activation(gate_up: torch.Tensor, activation: Activation | ClampedGate) -> torch.Tensor:
    """Compute activation(first half) * second half: [T, 2 * n] -> [T, n]. ClampedGate: what it describes instead."""
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(activation, ClampedGate):
        alpha, limit = activation
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (alpha * gate).sigmoid() * (up + 1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
