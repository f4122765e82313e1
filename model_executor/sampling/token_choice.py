"""The TokenChoice interface, and its implementation in plain torch.

cpu_choice.py implements it with compiled CPU operations. On a GPU, triton_sampling.py takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..step import INVALID_TOKEN
from .joint_sampling import choose_open, choose_ranked, gaps_below_best, weigh
from .sampling_state import Column, SamplingState

CPU_WIDTHS = (256, 4096)
"""Numbers of tokens that are ranked on a CPU, before the whole vocabulary is."""


@dataclass(slots=True, frozen=True)
class Block:
    """Lines of a batch whose tokens are chosen in the same way."""

    logits: torch.Tensor
    """float32 [n, vocab], the edited logits of the whole batch"""
    lines: torch.Tensor
    """int64 [b], indices of the block's lines in `logits`, on the device"""
    rows: torch.Tensor
    """int64 [b], rows of the lines, on the device"""
    draw: torch.Tensor
    """float64 [b] in [0, 1), random draws, on the device"""
    params: npt.NDArray[np.float64]
    """[b, columns], parameters of the rows (SamplingState), on the host"""

    def take(self) -> torch.Tensor:
        """A copy of the block's lines: float32 [b, vocab]."""
        return self.logits.index_select(0, self.lines)


class TokenChoice(Protocol):
    """Chooses tokens from logits.

    Each method returns int64 [b], with INVALID_TOKEN for logits that have a NaN or are all -inf. `Groups` says which
    rows use which method.
    """

    def greedy(self, x: torch.Tensor) -> torch.Tensor:
        """Choose the first of the largest logits. x: float32 [b, vocab]."""

    def open(self, block: Block) -> torch.Tensor:
        """Sample without top-k and top-p, with or without min_p."""

    def small_top_k(self, block: Block) -> torch.Tensor:
        """Sample with a small top-k, with or without top-p."""

    def ranked(self, block: Block) -> torch.Tensor:
        """Sample with top-p or a large top-k."""


class TorchChoice:
    """Chooses tokens in plain torch (TokenChoice)."""

    def __init__(self, state: SamplingState, vocab_size: int, *, on_cpu: bool) -> None:
        self._state = state
        # Top-p mostly keeps a few hundred tokens. A CPU can rank these first and check whether they suffice. On a GPU
        # the check would have to wait for the device, so the whole vocabulary is sorted at once.
        self._top_p_widths = (*(w for w in CPU_WIDTHS if on_cpu and w < vocab_size), vocab_size)

    def greedy(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":  # numpy's argmax is vectorised and 20 times as fast as torch's
            tokens = torch.from_numpy(x.numpy().argmax(axis=-1))
        else:
            tokens = x.argmax(dim=-1)
        return _valid(tokens, x.amax(dim=-1))

    def open(self, block: Block) -> torch.Tensor:
        peak, gap = self._gaps(block)
        has_min_p = bool((block.params[:, Column.MAX_GAP] < np.inf).any())
        max_gap = self._state.on_device(block.rows, Column.MAX_GAP).float() if has_min_p else None
        return _valid(choose_open(gap, block.draw.unsqueeze(1), max_gap), peak)

    def small_top_k(self, block: Block) -> torch.Tensor:
        return self._ranked(block, (int(block.params[:, Column.TOP_K].max()),))

    def ranked(self, block: Block) -> torch.Tensor:
        return self._ranked(block, self._top_p_widths)

    def _ranked(self, block: Block, widths: tuple[int, ...]) -> torch.Tensor:
        peak, gap = self._gaps(block)
        top_k = self._state.on_device(block.rows, Column.TOP_K).long()
        if (block.params[:, Column.TOP_P] < 1).any():
            top_p = self._state.on_device(block.rows, Column.TOP_P)
            mass = (weigh(gap).sum(dim=-1, keepdim=True) * top_p).ceil().long()
        else:
            mass = torch.full_like(top_k, torch.iinfo(torch.int64).max)
        max_gap = self._state.on_device(block.rows, Column.MAX_GAP).float()
        return _valid(choose_ranked(widths, gap, block.draw.unsqueeze(1), top_k, mass, max_gap), peak)

    def _gaps(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row, [b], and the gaps of its tokens, [b, vocab]."""
        x = block.take()
        peak = x.amax(dim=-1, keepdim=True)
        temperature = self._state.on_device(block.rows, Column.TEMPERATURE).float()
        return peak.squeeze(1), gaps_below_best(x, peak, temperature)


def _valid(tokens: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    # The peak is NaN if any logit of the row is NaN.
    return tokens.masked_fill_(~(peak > -torch.inf), INVALID_TOKEN)
