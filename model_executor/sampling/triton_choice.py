"""The TokenChoice on Triton kernels, with few launches and without a sort of the vocabulary."""

from __future__ import annotations

import torch

from ..kernels.argmax import argmax
from ..kernels.sampling import sample_open, sample_ranked
from .sampling_state import Column, SamplingState
from .token_choice import Block


class TritonChoice:
    """Chooses tokens with Triton kernels (TokenChoice)."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def greedy(self, x: torch.Tensor) -> torch.Tensor:
        return argmax(x)

    def open(self, block: Block) -> torch.Tensor:
        x = block.take()
        return sample_open(
            x,
            x.amax(dim=-1),
            self._column(block, Column.TEMPERATURE).float(),
            self._column(block, Column.MAX_GAP).float(),
            block.draw,
        )

    def small_top_k(self, block: Block) -> torch.Tensor:
        return self.ranked(block)

    def ranked(self, block: Block) -> torch.Tensor:
        x = block.take()
        return sample_ranked(
            x,
            x.amax(dim=-1),
            self._column(block, Column.TEMPERATURE).float(),
            self._column(block, Column.TOP_K).int(),
            self._column(block, Column.TOP_P),
            self._column(block, Column.MAX_GAP).float(),
            block.draw,
        )

    def _column(self, block: Block, column: Column) -> torch.Tensor:
        return self._state.on_device(block.rows, column).squeeze(1)
