"""Sampling in blocks of rows, by the operations of a TokenChoice. Blocks bound the memory of intermediate tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .. import cpu_extension
from ..step import Int32Array, TokenMasks
from .counter_rng import uniform
from .cpu_choice import CpuChoice
from .draft_verification import EarlierDrafts
from .logit_edits import LogitEdits
from .newest_tokens import NewestTokens
from .sampling_state import SamplingState
from .token_choice import Block, TokenChoice, TorchChoice
from .token_mask import MaskApplication, apply_masks_on_cpu, apply_masks_ref

BLOCK_ELEMENTS = 2**22
"""Rows are sampled in blocks of about this many logits."""
_BYTES_PER_RANKED_LOGIT = 64
_BYTES_PER_EDITED_LOGIT = 28
"""Of a block: the logits and the counts, and five more tensors of 32 bits."""


class BlockSampling:
    """The RowSampling of plain torch and of the compiled CPU operations."""

    masks_in_place = True

    def __init__(self, vocab_size: int, device: torch.device, state: SamplingState, edits: LogitEdits) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._state = state
        self._edits = edits
        self._block_rows = max(1, BLOCK_ELEMENTS // vocab_size)
        compiled = device.type == "cpu" and cpu_extension.load() is not None
        self._choice: TokenChoice = (
            CpuChoice() if compiled else TorchChoice(state, vocab_size, on_cpu=device.type == "cpu")
        )
        self._apply_masks: MaskApplication = apply_masks_on_cpu if compiled else apply_masks_ref

    def max_bytes(self, num_rows: int) -> int:
        """torch needs keys, weights and sums of 64 bits for a block of logits, and their sorted copies.

        Compiled operations need almost none.
        """
        if isinstance(self._choice, CpuChoice):
            return 0
        return _BYTES_PER_RANKED_LOGIT * self._vocab_size * min(self._block_rows, num_rows)

    def edit_bytes(self, num_rows: int) -> int:
        """All edited logits in float32, and the tensors of one block."""
        return self._vocab_size * (4 * num_rows + _BYTES_PER_EDITED_LOGIT * min(self._block_rows, num_rows))

    def sample(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        masks: TokenMasks | None,
        newest: NewestTokens | None,
        drafts: Int32Array | None,
    ) -> torch.Tensor:
        n = len(rows)
        if isinstance(self._choice, CpuChoice) and masks is None and not self._edits.any_needed(rows, positions):
            return self._choice.of_rows(logits, rows, positions, self._state, newest)
        x = self._edited(logits, rows, positions, drafts)
        if masks is not None:
            self._apply_masks(x, *self._state.send_all(masks.lines.astype(np.int64), masks.bits))
        groups, choice = self._state.group(rows), self._choice
        if len(groups.greedy):
            # Run it on all rows: to leave out the sampled rows, the others would have to be copied.
            tokens = choice.greedy(x)
        else:
            tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        if len(groups.greedy) < n:
            draws = uniform(self._state.seeds(rows), positions)
            for group, choose in (
                (groups.open, choice.open),
                (groups.small_top_k, choice.small_top_k),
                (groups.ranked, choice.ranked),
            ):
                for block in self._blocks(group):
                    packed = self._state.send(np.stack((block, rows[block], draws[block].view(np.int64))))
                    lines, block_rows, draw = packed[0], packed[1], packed[2].view(torch.float64)
                    chosen = choose(Block(x, lines, block_rows, draw, self._state.host[rows[block]]))
                    tokens.index_copy_(0, lines, chosen)
        if drafts is None:
            self._edits.count(rows, tokens)
        if newest is not None:
            newest.store(tokens)
        return tokens

    def _edited(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        drafts: Int32Array | None,
    ) -> torch.Tensor:
        """The edited logits in float32."""
        edited = np.flatnonzero(self._edits.needed(rows, positions))
        x = logits.detach().to(torch.float32, copy=len(edited) > 0)
        for block in self._blocks(edited):
            at = self._state.send(block)
            part = x.index_select(0, at)
            earlier = None if drafts is None else EarlierDrafts(drafts, block)
            self._edits.apply(part, rows[block], positions[block], earlier)
            x.index_copy_(0, at, part)
        return x

    def _blocks(self, positions: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        return [positions[i : i + self._block_rows] for i in range(0, len(positions), self._block_rows)]
