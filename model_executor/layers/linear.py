"""A matrix that activations are multiplied with."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """x [T, in] -> x @ weight.T + bias [T, out]; weight: [out, in], bias: [out] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
