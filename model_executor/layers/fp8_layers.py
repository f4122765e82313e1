"""Linear layers with fp8 weights, on Triton kernels (kernels/fp8_linear.py)."""

from __future__ import annotations

import torch

from ...srt.model_files.model_config import Activation
from ..forward_batch import ForwardBatch
from ..kernels.activation import act_and_mul
from ..kernels.fp8_linear import fp8_linear
from .fp8_weight import Fp8Weight


class Fp8Linear:
    """`Linear` on an fp8 weight. Activations are rounded to fp8 before the product."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return fp8_linear(x, *self.weight, self.bias)


class Fp8GatedLinear:
    """`GatedLinear` on an fp8 weight."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None = None, activation: Activation = "silu") -> None:
        self.linear = Fp8Linear(weight, bias)
        self._activation = activation

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return act_and_mul(self.linear(x, batch), self._activation)
