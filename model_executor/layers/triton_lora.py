"""The tables of LoRA adapters for Triton layers (kernels/lora.py)."""

from __future__ import annotations

import torch

from ..forward_batch import TokenAdapters
from ..kernels.lora import lora_delta
from .lora_layers import TorchLoraTables


class TritonLoraTables(TorchLoraTables):
    """The LoraTables whose sums are two launches, which depend on shapes only. So a CUDA graph may record them."""

    def add(self, x: torch.Tensor, out: torch.Tensor, adapters: TokenAdapters) -> None:
        lora_delta(x, out, self.a, self.b, adapters.slots, self._shape.rows)
