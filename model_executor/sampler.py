"""Chooses the next token of every row: greedy, or sampled with temperature, top-k, top-p and min-p jointly.

A request's token depends on its own logits, parameters, seed and position, bit for bit, whatever else is in
the batch: see joint_sampling.py for how. Nothing here waits for the device, except on a CPU, where there is
nothing to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .counter_rng import uniform
from .device_buffers import Uploads
from .forward_batch import Int32Array, NewRow
from .joint_sampling import MAX_VOCAB_SIZE, choose_open, choose_ranked, gaps_below_best, weigh
from .logit_edits import LogitEdits
from .sampling_state import Column, SamplingState

BLOCK_ELEMENTS = 2**22
"""Rows are sampled in blocks of about this many logits, which bounds the memory of the steps in between."""
CPU_WIDTHS = (256, 4096)
INVALID_TOKEN = -1


@dataclass(slots=True, frozen=True)
class _Batch:
    x: torch.Tensor
    """float32 [n, vocab] logits, edited"""
    peak: torch.Tensor
    """float32 [n, 1] the largest of each line"""
    rows: npt.NDArray[np.int64]
    draws: npt.NDArray[np.float64]


@dataclass(slots=True, frozen=True)
class _Block:
    """Some positions of a batch, on the device."""

    at: torch.Tensor
    """int64 [b] positions in the batch"""
    rows: torch.Tensor
    """int64 [b]"""
    gap: torch.Tensor
    """float32 [b, vocab], see `gaps_below_best`"""
    draw: torch.Tensor
    """float64 [b, 1]"""
    params: npt.NDArray[np.float64]
    """[b, columns], on the host"""


class Sampler:
    """Samples from logits for the rows 0..num_rows of a ReqToTokenPool (row 0, padding, is greedy).

    All device work is queued on the current stream; `set_row` and `sample` must be called on the same one.

    Args:
        num_rows: rows that requests may hold, 1..num_rows
        vocab_size: width of the logits, at most MAX_VOCAB_SIZE
        device: where the logits will be
        uploads: the way there; default: one of its own
    """

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device | str, uploads: Uploads | None = None
    ) -> None:
        assert 0 < vocab_size <= MAX_VOCAB_SIZE, vocab_size
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._state = SamplingState(num_rows, vocab_size, self._device, uploads)
        self._edits = LogitEdits(num_rows, vocab_size, self._device, self._state)
        self._block_rows = max(1, BLOCK_ELEMENTS // vocab_size)
        # A CPU finds top-p's tokens among a few hundred, mostly, and may look at the result before it tries
        # more. Elsewhere looking would mean waiting, so the whole vocabulary is sorted at once.
        on_cpu = self._device.type == "cpu"
        self._top_p_widths = (*(w for w in CPU_WIDTHS if on_cpu and w < vocab_size), vocab_size)

    @property
    def most_table_bytes(self) -> int:
        """Device memory that penalties and biases take when every row asks for them."""
        return self._num_rows * self._vocab_size * (4 + 4)

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
        peak = x.amax(dim=-1, keepdim=True)
        groups = self._state.group(host_rows)
        if len(groups.greedy) == n:
            tokens = _argmax(x)
        else:
            tokens = torch.empty(n, dtype=torch.int64, device=self._device)
            if len(groups.greedy):
                at = self._state.send(groups.greedy)
                tokens.index_copy_(0, at, _argmax(x.index_select(0, at)))
            batch = _Batch(x, peak, host_rows, uniform(self._state.seeds(host_rows), positions))
            for group, choose in (
                (groups.open, self._sample_open),
                (groups.few, self._sample_few),
                (groups.many, self._sample_many),
            ):
                for positions_of_block in self._blocks(group):
                    block = self._take(batch, positions_of_block)
                    tokens.index_copy_(0, block.at, choose(block))
        # peak is NaN where any logit is.
        tokens.masked_fill_(~(peak.squeeze(1) > -torch.inf), INVALID_TOKEN)
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

    def _take(self, batch: _Batch, at: npt.NDArray[np.int64]) -> _Block:
        rows = batch.rows[at]
        packed = self._state.send(np.stack((at, rows, batch.draws[at].view(np.int64))))
        at_device, rows_device, draw = packed[0], packed[1], packed[2].view(torch.float64).unsqueeze(1)
        temperature = self._state.on_device(rows_device, Column.TEMPERATURE).float()
        x, peak = batch.x.index_select(0, at_device), batch.peak.index_select(0, at_device)
        return _Block(at_device, rows_device, gaps_below_best(x, peak, temperature), draw, self._state.host[rows])

    def _sample_open(self, block: _Block) -> torch.Tensor:
        has_min_p = bool((block.params[:, Column.MAX_GAP] < np.inf).any())
        max_gap = self._state.on_device(block.rows, Column.MAX_GAP).float() if has_min_p else None
        return choose_open(block.gap, block.draw, max_gap)

    def _sample_few(self, block: _Block) -> torch.Tensor:
        return self._sample_ranked(block, (int(block.params[:, Column.TOP_K].max()),))

    def _sample_many(self, block: _Block) -> torch.Tensor:
        return self._sample_ranked(block, self._top_p_widths)

    def _sample_ranked(self, block: _Block, widths: tuple[int, ...]) -> torch.Tensor:
        top_k = self._state.on_device(block.rows, Column.TOP_K).long()
        if (block.params[:, Column.TOP_P] < 1).any():
            top_p = self._state.on_device(block.rows, Column.TOP_P)
            mass = (weigh(block.gap).sum(dim=-1, keepdim=True) * top_p).ceil().long()
        else:
            mass = torch.full_like(top_k, torch.iinfo(torch.int64).max)
        max_gap = self._state.on_device(block.rows, Column.MAX_GAP).float()
        return choose_ranked(widths, block.gap, block.draw, top_k, mass, max_gap)

    def _blocks(self, positions: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        return [positions[i : i + self._block_rows] for i in range(0, len(positions), self._block_rows)]


def _argmax(x: torch.Tensor) -> torch.Tensor:
    """The first of the largest: int64 [n] from [n, vocab]."""
    if x.device.type == "cpu":  # numpy's argmax is vectorised, torch's is not: a factor of 20
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)
