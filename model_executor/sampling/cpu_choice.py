"""The TokenChoice on compiled CPU operations, which neither sort nor copy the vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .newest_tokens import NewestTokens
from .sampling_state import Column, SamplingState
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

    def of_rows(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        state: SamplingState,
        newest: NewestTokens | None,
    ) -> torch.Tensor:
        """The tokens of a whole batch without edits, by one operation, which also draws and stores them in `newest`."""
        params, seeds = state.host_tensors
        tokens: torch.Tensor = torch.ops.tercet_cpu.choose_tokens(
            logits.detach().to(torch.float32).contiguous(),
            torch.from_numpy(rows),
            torch.from_numpy(positions),
            params,
            seeds,
            None if newest is None else newest.tokens,
        )
        return tokens
