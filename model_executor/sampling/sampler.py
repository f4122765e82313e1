"""Chooses the next token of every row: greedy, or sampled with temperature, top-k, top-p and min-p jointly.

A request's token depends on its own logits, parameters, seed and position, bit for bit, whatever else is in
the batch: see joint_sampling.py for how. Nothing here waits for the device, except on a CPU, where there is
nothing to wait for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .. import cpu_extension
from ..device.device_buffers import Uploads
from ..step import Int32Array, NewRow
from .counter_rng import uniform
from .cpu_choice import CpuChoice
from .joint_sampling import MAX_VOCAB_SIZE
from .logit_edits import LogitEdits
from .sampling_state import SamplingState
from .token_choice import INVALID_TOKEN, Block, TokenChoice, TorchChoice

__all__ = ["INVALID_TOKEN", "Sampler"]

BLOCK_ELEMENTS = 2**22
"""Rows are sampled in blocks of about this many logits, which bounds the memory of the steps in between."""
_BYTES_PER_RANKED_LOGIT = 64


class Sampler:
    """Samples from logits for the rows 0..num_rows of a ReqToTokenPool (row 0, padding, is greedy).

    All device work is queued on the current stream; `set_row` and `sample` must be called on the same one.

    Args:
        num_rows: rows that requests may hold, 1..num_rows
        vocab_size: width of the logits; ValueError where it exceeds MAX_VOCAB_SIZE
        device: where the logits will be
        uploads: the way there; default: one of its own
        use_kernels: choose on Triton kernels
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
        self._block_rows = max(1, BLOCK_ELEMENTS // vocab_size)
        self._choice = _make_choice(self._state, vocab_size, self._device, use_kernels)

    @property
    def max_edit_bytes(self) -> int:
        """Device memory that edits of logits take when every row asks for all of them: counts, biases, one of the two
        while it grows, and the edited copy."""
        return self._num_rows * self._vocab_size * 4 * 4

    @property
    def max_choice_bytes(self) -> int:
        """Memory that torch's choice of tokens takes on a CPU: a block of logits as keys, weights and sums of 64 bits
        each, and those in order. Compiled operations need next to none."""
        if isinstance(self._choice, CpuChoice):
            return 0
        return _BYTES_PER_RANKED_LOGIT * self._vocab_size * min(self._block_rows, self._num_rows)

    @torch.inference_mode()
    def set_row(self, new_row: NewRow) -> None:
        """The row has a new owner, or the same one again after a retraction: forgets what it knew of the row."""
        assert 0 < new_row.row <= self._num_rows, new_row.row
        self._state.set_row(new_row)
        self._edits.set_row(new_row)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Int32Array, seq_lens: Int32Array) -> torch.Tensor:
        """Chooses one token per row, and counts it for the row's penalties.

        Args:
            logits: [n, vocab], any float type; not changed
            rows: int32 [n], the row of each line of logits
            seq_lens: int32 [n], tokens of the request before the one to be chosen

        Returns:
            int64 [n] on the device; INVALID_TOKEN where logits hold a NaN or leave no token possible
        """
        n = len(rows)
        assert logits.shape == (n, self._vocab_size), (tuple(logits.shape), n, self._vocab_size)
        host_rows, positions = rows.astype(np.int64), seq_lens.astype(np.int64)
        self._state.flush()
        x = self._edited(logits, host_rows, positions)
        groups, choice = self._state.group(host_rows), self._choice
        if len(groups.greedy):
            # Of all rows: leaving the sampled ones out would mean to copy the others.
            tokens = choice.greedy(x)
        else:
            tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        if len(groups.greedy) < n:
            draws = uniform(self._state.seeds(host_rows), positions)
            for group, choose in ((groups.open, choice.open), (groups.few, choice.few), (groups.many, choice.many)):
                for block in self._blocks(group):
                    packed = self._state.send(np.stack((block, host_rows[block], draws[block].view(np.int64))))
                    lines, block_rows, draw = packed[0], packed[1], packed[2].view(torch.float64)
                    chosen = choose(Block(x, lines, block_rows, draw, self._state.host[host_rows[block]]))
                    tokens.index_copy_(0, lines, chosen)
        self._edits.count(host_rows, tokens)
        return tokens

    def _edited(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """The logits in float32 after penalties, bias and early stops."""
        edited = np.flatnonzero(self._edits.needed(rows, positions))
        x = logits.detach().to(torch.float32, copy=len(edited) > 0)
        for block in self._blocks(edited):
            at = self._state.send(block)
            part = x.index_select(0, at)
            self._edits.apply(part, rows[block], positions[block])
            x.index_copy_(0, at, part)
        return x

    def _blocks(self, positions: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        return [positions[i : i + self._block_rows] for i in range(0, len(positions), self._block_rows)]


def _make_choice(state: SamplingState, vocab_size: int, device: torch.device, use_kernels: bool) -> TokenChoice:
    if use_kernels:
        from .triton_choice import TritonChoice  # Triton takes half a second to import

        return TritonChoice(state)
    on_cpu = device.type == "cpu"
    if on_cpu and cpu_extension.load() is not None:
        return CpuChoice()
    return TorchChoice(state, vocab_size, on_cpu=on_cpu)
