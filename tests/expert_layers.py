"""Drawn layers of a mixture of experts, for tests of their kernels on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from tercet.model_executor.kernels.experts import expert_weight_tables, experts_forward, experts_forward_ref
from tercet.model_executor.layers.fp8_weight import Fp8Weight, quantize_fp8
from tercet.srt.model_files.experts_config import ClampedGate

GATE = ClampedGate(alpha=1.702, limit=1.5)
"""Its limit is reached often."""


@dataclass
class ExpertLayer:
    """A layer. Logits of its router are whole numbers, so that equal ones are common and others are far apart."""

    router: torch.Tensor
    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]
    top_k: int
    normalized: bool
    router_bias: torch.Tensor | None = None
    gate_up_bias: list[torch.Tensor] = field(default_factory=list)
    down_bias: list[torch.Tensor] = field(default_factory=list)
    gate: ClampedGate | None = None
    sigmoids: bool = False
    corrections: torch.Tensor | None = None
    least_sum: float = 0.0
    scale: float = 1.0
    gate_up_scales: list[torch.Tensor] = field(default_factory=list)
    """of fp8 weights"""
    down_scales: list[torch.Tensor] = field(default_factory=list)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        scales = {"gate_up_scales": self.gate_up_scales, "down_scales": self.down_scales}
        tables = expert_weight_tables(self.gate_up, self.down, self.gate_up_bias, self.down_bias, **scales)
        return experts_forward(
            x, self.router, tables, self.top_k, normalized=self.normalized, router_bias=self.router_bias,
            sigmoids=self.sigmoids, corrections=self.corrections, least_sum=self.least_sum, scale=self.scale,
            gate=self.gate,
        )  # fmt: skip

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """In float64."""
        return experts_forward_ref(
            x.double(), self.router.double(), self.gate_up, self.down, self.top_k, normalized=self.normalized,
            router_bias=self.router_bias, sigmoids=self.sigmoids, corrections=self.corrections,
            least_sum=self.least_sum, scale=self.scale, gate_up_bias=self.gate_up_bias, down_bias=self.down_bias,
            gate=self.gate,
        )  # fmt: skip

    def error(self, x: torch.Tensor) -> float:
        """Relative to the largest number."""
        expected = self.expected(x)
        return float((self.run(x).double() - expected).abs().max() / (1e-3 + expected.abs().max()))


def fp8_pair(layer: ExpertLayer, form: str, *, exact: bool = False) -> tuple[ExpertLayer, ExpertLayer]:
    """A layer with its weights in fp8, and one with the weights that these stand for, in the type of the layer's.

    `exact`: whether scales are powers of two, with which every type of 16 bits holds the products.
    """
    fp8, wide = replace(layer), replace(layer)
    for name in ("gate_up", "down"):
        weights = [quantize_fp8(weight, form) for weight in getattr(layer, name)]
        if exact:
            weights = [Fp8Weight(values, scales.log2().round().exp2()) for values, scales in weights]
        setattr(wide, name, [weight.dequantize().to(layer.router.dtype) for weight in weights])
        setattr(fp8, name, [weight.values for weight in weights])
        setattr(fp8, f"{name}_scales", [weight.scales for weight in weights])
    return fp8, wide


def draw_layer(
    seed: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
    *,
    normalized: bool = True,
    biased: bool = False,
    gate: ClampedGate | None = None,
    corrected: str | None = None,
    device: str = "cpu",
) -> ExpertLayer:
    """`biased`: whether the router and the experts have biases. `corrected`: "sigmoids" or "softmax" if the
    router has corrections of them. They are even, so that those of other experts are far apart."""
    g = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> list[torch.Tensor]:
        return [(torch.randn(shape, generator=g) * shape[1] ** -0.5).to(device, dtype) for _ in range(num_experts)]

    router = torch.randint(-1, 2, (num_experts, hidden), generator=g)
    router[:, 12:] = 0  # few terms: no probability is too small to be told from zero
    layer = ExpertLayer(router.to(device, dtype), weights(2 * inter, hidden), weights(hidden, inter), top_k, normalized)
    layer.gate = gate
    if corrected is not None:
        layer.sigmoids, layer.least_sum = corrected == "sigmoids", 0.25
        layer.corrections = torch.randint(-1, 2, (num_experts,), generator=g).to(device, torch.float32) * 2
        layer.scale = 2.5
    if biased:
        layer.router_bias = torch.randint(-2, 3, (num_experts,), generator=g).to(device, dtype)
        layer.gate_up_bias = list(torch.randn(num_experts, 2 * inter, generator=g).to(device, dtype))
        layer.down_bias = list(torch.randn(num_experts, hidden, generator=g).to(device, dtype))
    return layer


def draw_rows(seed: int, num_rows: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows [num_rows, hidden] of small whole numbers, as a view of longer rows."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (num_rows, hidden + 8), generator=g).to(device, dtype)[:, :hidden]
