"""The sampler: it chooses the next token of each row, greedily or with temperature, top-k, top-p and min-p.

A request's token depends only on its own logits, parameters, seed and position, never on the rest of the batch
(joint_sampling.py says how). The sampler never waits for a GPU.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .. import cpu_extension
from ..device.device_buffers import Uploads
from ..step import Int32Array, NewRow, TokenMasks
from .counter_rng import uniform
from .cpu_choice import CpuChoice
from .joint_sampling import MAX_VOCAB_SIZE
from .logit_edits import LogitEdits
from .sampling_state import SamplingState
from .token_choice import INVALID_TOKEN, Block, TokenChoice, TorchChoice
from .token_mask import MaskApplication, apply_masks_on_cpu, apply_masks_ref

__all__ = ["INVALID_TOKEN", "Sampler"]

BLOCK_ELEMENTS = 2**22
"""Rows are sampled in blocks of about this many logits, which bounds the memory of intermediate tensors."""
_BYTES_PER_RANKED_LOGIT = 64


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
        self._block_rows = max(1, BLOCK_ELEMENTS // vocab_size)
        self._choice = _make_choice(self._state, vocab_size, self._device, use_kernels)
        self._apply_masks = _make_mask_application(self._device, use_kernels)

    @property
    def max_edit_bytes(self) -> int:
        """The device memory of logit edits in bytes when all rows need all edits.

        It holds the counts, the biases, a second copy of one of these while it grows, and the edited logits.
        """
        return self._num_rows * self._vocab_size * 4 * 4

    @property
    def max_choice_bytes(self) -> int:
        """The memory in bytes that the choice of tokens takes on a CPU.

        torch needs keys, weights and sums of 64 bits for a block of logits, and their sorted copies. Compiled
        operations need almost none.
        """
        if isinstance(self._choice, CpuChoice):
            return 0
        return _BYTES_PER_RANKED_LOGIT * self._vocab_size * min(self._block_rows, self._num_rows)

    @torch.inference_mode()
    def set_row(self, new_row: NewRow) -> None:
        """Set the parameters of a row's new owner (or the same one after a retraction), and forget the old ones."""
        assert 0 < new_row.row <= self._num_rows, new_row.row
        self._state.set_row(new_row)
        self._edits.set_row(new_row)

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Int32Array, seq_lens: Int32Array, masks: TokenMasks | None = None
    ) -> torch.Tensor:
        """Choose one token for each row, and count it for the row's penalties.

        Args:
            logits: [n, vocab], any float type; float32 logits are changed by `masks`, and by nothing else
            rows: int32 [n], the row of each line of logits
            seq_lens: int32 [n], length of the request before the new token
            masks: the tokens that grammars allow. They are applied after all other edits

        Returns:
            int64 [n] on the device; INVALID_TOKEN if the logits have a NaN or are all -inf
        """
        n = len(rows)
        assert logits.shape == (n, self._vocab_size), (tuple(logits.shape), n, self._vocab_size)
        host_rows, positions = rows.astype(np.int64), seq_lens.astype(np.int64)
        self._state.flush()
        x = self._edited(logits, host_rows, positions)
        if masks is not None:
            self._apply_masks(x, *self._state.send_all(masks.lines.astype(np.int64), masks.bits))
        groups, choice = self._state.group(host_rows), self._choice
        if len(groups.greedy):
            # Run it on all rows: to leave out the sampled rows, the others would have to be copied.
            tokens = choice.greedy(x)
        else:
            tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        if len(groups.greedy) < n:
            draws = uniform(self._state.seeds(host_rows), positions)
            for group, choose in (
                (groups.open, choice.open),
                (groups.small_top_k, choice.small_top_k),
                (groups.ranked, choice.ranked),
            ):
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
        """The edited logits in float32."""
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


def _make_mask_application(device: torch.device, use_kernels: bool) -> MaskApplication:
    if use_kernels:
        from ..kernels.token_mask import apply_masks  # importing Triton takes half a second

        return apply_masks
    return apply_masks_on_cpu if device.type == "cpu" and cpu_extension.load() is not None else apply_masks_ref


def _make_choice(state: SamplingState, vocab_size: int, device: torch.device, use_kernels: bool) -> TokenChoice:
    if use_kernels:
        from .triton_choice import TritonChoice  # importing Triton takes half a second

        return TritonChoice(state)
    on_cpu = device.type == "cpu"
    if on_cpu and cpu_extension.load() is not None:
        return CpuChoice()
    return TorchChoice(state, vocab_size, on_cpu=on_cpu)
