"""The gated activation of a SwiGLU feed-forward layer (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(first half) * second half: [T, 2 * n] -> [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
