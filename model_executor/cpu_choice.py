"""How tokens are chosen from logits on a CPU, by its compiled operations (csrc/cpu)."""

from __future__ import annotations

import torch

from .token_choice import TorchChoice


class CpuChoice(TorchChoice):
    """See TokenChoice."""

    def greedy(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = torch.ops.tercet_cpu.argmax(x.contiguous())
        return tokens
