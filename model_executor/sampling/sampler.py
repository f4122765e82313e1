"""The sampler: it chooses the next token of each row, greedily or with temperature, top-k, top-p and min-p.

A request's token depends only on its own logits, parameters, seed and position, never on the rest of the batch
(joint_sampling.py says how). The sampler never waits for a GPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..device.device_buffers import Uploads
from ..device.inference_mode import in_inference_mode
from ..step import Int32Array, NewRow, TokenMasks
from .block_sampling import BlockSampling
from .draft_verification import Verified
from .joint_sampling import MAX_VOCAB_SIZE
from .logit_edits import LogitEdits
from .newest_tokens import NewestTokens
from .sampling_state import SamplingState


class RowSampling(Protocol):
    """A way to choose the tokens of all rows of a step."""

    masks_in_place: bool
    """whether token masks change float32 logits"""

    def max_bytes(self, num_rows: int) -> int:
        """The memory in bytes that it takes on a CPU for `num_rows` rows, besides edits."""

    def edit_bytes(self, num_rows: int) -> int:
        """The memory in bytes that edits of `num_rows` rows take: the edited logits, and what computes them."""

    def sample(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        masks: TokenMasks | None,
        newest: NewestTokens | None,
        drafts: Int32Array | None,
    ) -> torch.Tensor:
        """Choose, count and store a token for each row, as `Sampler.sample` does. rows, positions: [n], n > 0."""


class Sampler:
    """Samples tokens for rows 0..num_rows of a ReqToTokenPool. Row 0 is padding and greedy.

    All device work is queued on the current stream, which must be the same for `set_row` and `sample`.

    Args:
        num_rows: requests have rows 1..num_rows
        vocab_size: width of the logits, at most MAX_VOCAB_SIZE (else ValueError)
        device: device of the logits
        uploads: transfers to the device; None: its own
        use_kernels: whether Triton kernels choose the tokens
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device | str,
        uploads: Uploads | None = None,
        *,
        use_kernels: bool = False,
    ) -> None:
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"the vocabulary must have at most {MAX_VOCAB_SIZE} tokens, got {vocab_size}")
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._state = SamplingState(num_rows, vocab_size, self._device, uploads)
        self._edits = LogitEdits(num_rows, vocab_size, self._device, self._state)
        self._sampling = self._make_sampling(use_kernels)

    def max_edit_bytes(self, num_choices: int) -> int:
        """The device memory of logit edits in bytes when all rows, and `num_choices` choices of tokens, need all edits.

        It holds the counts, the biases, a second copy of one of these while it grows, and what the edits take.
        """
        return self._num_rows * self._vocab_size * 4 * 3 + self._sampling.edit_bytes(num_choices)

    def max_choice_bytes(self, num_choices: int) -> int:
        """The memory in bytes that `num_choices` choices of tokens take on a CPU."""
        return self._sampling.max_bytes(num_choices)

    @property
    def masks_in_place(self) -> bool:
        """Whether `sample` applies masks to the given logits, if they are float32."""
        return self._sampling.masks_in_place

    @in_inference_mode
    def set_row(self, new_row: NewRow) -> None:
        """Set the parameters of a row's new owner (or the same one after a retraction), and forget the old ones."""
        assert 0 < new_row.row <= self._num_rows, new_row.row
        self._state.set_row(new_row)
        self._edits.set_row(new_row)

    def takes_most_probable(self, rows: Int32Array, seq_lens: Int32Array) -> bool:
        """Whether all of these rows are greedy and their logits need no edits. Arguments as for `sample`.

        Then `sample` without masks would choose the first largest logit of each row, and only store the tokens.
        """
        return self._state.all_greedy(rows) and not self._edits.any_needed(rows, seq_lens)

    @in_inference_mode
    def sample(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        seq_lens: Int32Array,
        masks: TokenMasks | None = None,
        newest: NewestTokens | None = None,
        drafts: Int32Array | None = None,
    ) -> torch.Tensor:
        """Choose one token for each row, and count it for the row's penalties.

        With drafts, a row has several lines of logits, and the caller must `count` the accepted tokens.

        Args:
            logits: [n, vocab], any float type; not changed, except by `masks` (see `masks_in_place`)
            rows: int32 [n], the row of each line of logits
            seq_lens: int32 [n], length of the request before the new token
            masks: the tokens that grammars allow. They are applied after all other edits
            newest: where the tokens are stored besides
            drafts: int32 [n], the draft after each line, see `Choices`; None: there are none. Not with kernels

        Returns:
            int64 [n] on the device; INVALID_TOKEN if the logits have a NaN or are all -inf
        """
        n = len(rows)
        assert logits.shape == (n, self._vocab_size), (tuple(logits.shape), n, self._vocab_size)
        if not n:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        self._state.flush()
        return self._sampling.sample(logits, rows.astype(np.int64), seq_lens.astype(np.int64), masks, newest, drafts)

    @in_inference_mode
    def count(self, verified: Verified) -> None:
        """Count the accepted tokens of a step with drafts for the penalties of their rows."""
        if self._edits.any_counted(verified.rows):
            rows = np.repeat(verified.rows, verified.num_tokens)
            self._edits.count(rows.astype(np.int64), self._state.send(verified.tokens.astype(np.int64)))

    def _make_sampling(self, use_kernels: bool) -> RowSampling:
        if use_kernels:
            from .triton_sampling import TritonSampling  # importing Triton takes half a second

            return TritonSampling(self._vocab_size, self._state, self._edits)
        return BlockSampling(self._vocab_size, self._device, self._state, self._edits)
