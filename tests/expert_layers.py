"""Drawn layers of a mixture of experts, for tests of their kernels on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tercet.model_executor.kernels.experts import expert_weight_tables, experts_forward, experts_forward_ref


@dataclass
class ExpertLayer:
    """A layer. Logits of its router are whole numbers, so that equal ones are common and others are far apart."""

    router: torch.Tensor
    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]
    top_k: int
    normalized: bool

    def run(self, x: torch.Tensor) -> torch.Tensor:
        tables = expert_weight_tables(self.gate_up, self.down)
        return experts_forward(x, self.router, tables, self.top_k, normalized=self.normalized)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """In float64."""
        return experts_forward_ref(
            x.double(), self.router.double(), self.gate_up, self.down, self.top_k, normalized=self.normalized
        )

    def error(self, x: torch.Tensor) -> float:
        """Relative to the largest number."""
        expected = self.expected(x)
        return float((self.run(x).double() - expected).abs().max() / (1e-3 + expected.abs().max()))


def draw_layer(
    seed: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    dtype: torch.dtype,
    *,
    normalized: bool = True,
    device: str = "cpu",
) -> ExpertLayer:
    g = torch.Generator().manual_seed(seed)

    def weights(*shape: int) -> list[torch.Tensor]:
        return [(torch.randn(shape, generator=g) * shape[1] ** -0.5).to(device, dtype) for _ in range(num_experts)]

    router = torch.randint(-1, 2, (num_experts, hidden), generator=g)
    router[:, 12:] = 0  # few terms: no probability is too small to be told from zero
    return ExpertLayer(router.to(device, dtype), weights(2 * inter, hidden), weights(hidden, inter), top_k, normalized)


def draw_rows(seed: int, num_rows: int, hidden: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows [num_rows, hidden] of small whole numbers, as a view of longer rows."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (num_rows, hidden + 8), generator=g).to(device, dtype)[:, :hidden]
