"""Sampling on Triton kernels: a handful of launches for all rows of a step, whatever their parameters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.argmax import argmax
from ..kernels.logit_edits import EditTables
from ..kernels.sampling import choose_tokens
from ..kernels.sampling_layout import Field
from ..step import Int32Array, TokenMasks
from .counter_rng import uniform
from .logit_edits import LogitEdits
from .newest_tokens import NewestTokens
from .sampling_state import SamplingState


class TritonSampling:
    """The RowSampling of Triton kernels. One upload tells them all that the host knows of the rows."""

    masks_in_place = False

    def __init__(self, vocab_size: int, state: SamplingState, edits: LogitEdits) -> None:
        self._vocab_size = vocab_size
        self._state = state
        self._edits = edits

    def max_bytes(self, num_rows: int) -> int:
        """0: a GPU's warm-up steps measure the memory."""
        return 0

    def edit_bytes(self, num_rows: int) -> int:
        """The edited logits in float32."""
        return 4 * self._vocab_size * num_rows

    def sample(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        masks: TokenMasks | None,
        newest: NewestTokens | None,
        drafts: Int32Array | None,
    ) -> torch.Tensor:
        assert drafts is None, "settings refuse drafts with kernels"
        kinds = self._state.kinds(rows)
        edited = self._edits.needed(rows, positions)
        if masks is not None:
            edited[masks.lines] = True
        if not (kinds.any_sampled or edited.any()):
            return argmax(logits) if newest is None else argmax(logits, *newest)
        lines = self._edits.lines(rows, positions)
        plan = np.full((len(rows), len(Field)), -1, np.int64)
        plan[:, Field.ROW] = rows
        if kinds.any_sampled:
            plan[:, Field.DRAW] = uniform(self._state.seeds(rows), positions).view(np.int64)
        plan[:, Field.COUNTS] = lines.counts
        plan[:, Field.BIAS] = lines.bias
        if masks is not None:
            plan[masks.lines, Field.MASK] = np.arange(len(masks.lines))
        plan[edited, Field.EDITED] = np.arange(np.count_nonzero(edited))
        plan[:, Field.STOPS_END] = lines.stop_ends
        plan[0, Field.STOPS_START] = 0
        plan[1:, Field.STOPS_START] = lines.stop_ends[:-1]
        mask_bits = np.empty((0, 0), np.int32) if masks is None else masks.bits
        sent, stop_ids, mask_bits_sent = self._state.send_all(plan, lines.stop_ids, mask_bits)
        return choose_tokens(
            logits.float(),
            self._state.table,
            sent,
            EditTables(self._edits.counts, self._edits.bias, stop_ids, mask_bits_sent),
            num_edited=int(np.count_nonzero(edited)),
            any_sampled=kinds.any_sampled,
            any_ranked=kinds.any_ranked,
            newest_tokens=None if newest is None else newest.tokens,
        )
