"""The TokenChoice on compiled CPU operations, which neither sort nor copy the vocabulary."""

from __future__ import annotations

import torch

from .sampling_state import Column
from .token_choice import Block


class CpuChoice:
    """Chooses tokens with compiled CPU operations (TokenChoice)."""

    def greedy(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = torch.ops.tercet_cpu.argmax(x.contiguous())
        return tokens

    def open(self, block: Block) -> torch.Tensor:
        columns = torch.from_numpy(block.params.T)
        tokens: torch.Tensor = torch.ops.tercet_cpu.sample(
            block.logits.contiguous(),
            block.lines,
            columns[Column.TEMPERATURE],
            columns[Column.TOP_K],
            columns[Column.TOP_P],
            columns[Column.MAX_GAP],
            block.draw,
        )
        return tokens

    small_top_k = ranked = open  # one operation serves all three
