"""Drawn linear layers with LoRA adapters, for tests of their kernels on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tercet.model_executor.kernels.lora import lora_delta, lora_delta_ref


@dataclass
class LoraLayer:
    """The adapters of a layer, and the rows of a step."""

    a: torch.Tensor
    b: torch.Tensor
    sizes: tuple[int, ...]
    x: torch.Tensor
    out: torch.Tensor
    """What the layer computes without adapters"""
    adapters: torch.Tensor

    def run(self, rows: slice | list[int] = slice(None)) -> torch.Tensor:
        out = self.out[rows].clone()
        lora_delta(self.x[rows], out, self.a, self.b, self.adapters[rows], self.sizes)
        return out

    def expected(self) -> torch.Tensor:
        """In float64."""
        out = self.out.double()
        lora_delta_ref(self.x.double(), out, self.a.double(), self.b.double(), self.adapters, self.sizes)
        return out

    def error(self) -> float:
        """Relative to the largest number."""
        expected = self.expected()
        return float((self.run().double() - expected).abs().max() / (1e-3 + expected.abs().max()))


def draw_layer(
    seed: int,
    rows: int,
    num_in: int,
    sizes: tuple[int, ...],
    rank: int,
    slots: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> LoraLayer:
    """Rows of any adapters, or of runs of the same one, as in a prefill. x is a view of longer rows."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, kind: torch.dtype = dtype, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * scale).to(device, kind)

    parts, num_out = len(sizes), sum(sizes)
    adapters = torch.randint(0, slots + 1, (rows,), generator=g, dtype=torch.int32)
    if seed % 2:
        adapters = adapters.sort().values
    return LoraLayer(
        draw(slots, parts * rank, num_in, scale=num_in**-0.5), draw(slots, num_out, rank, scale=rank**-0.5), sizes,
        draw(rows, num_in + 8)[:, :num_in], draw(rows, num_out, kind=out_dtype or dtype), adapters.to(device),
    )  # fmt: skip
