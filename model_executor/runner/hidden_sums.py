"""Sums of final hidden states, which embeddings are made of, and their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..device.device_buffers import ArrayCopy, Downloads
from ..step import HIDDEN_UNIT, HiddenSum

_BLOCK_ROWS = 1024
"""Hidden states are converted in blocks of this many tokens, whatever the length of the prompt."""


class ArrivingSums(NamedTuple):
    """The sums of a step on their way to the host."""

    copy: ArrayCopy
    """int64 [number of sums * hidden_size]"""
    num_sums: int

    def wait(self) -> list[npt.NDArray[np.int64]]:
        return list(self.copy.wait().reshape(self.num_sums, -1).copy())


def sum_hidden(wanted: Sequence[HiddenSum], hidden: torch.Tensor, downloads: Downloads) -> ArrivingSums:
    """Queue the sums. `hidden`: the hidden states of the first sum first, [sum of lengths, hidden_size]."""
    parts = []
    for states in hidden.split([one.length for one in wanted]):
        blocks = [(block.double() / HIDDEN_UNIT).round_().long().sum(0) for block in states.split(_BLOCK_ROWS)]
        parts.append(blocks[0] if len(blocks) == 1 else torch.stack(blocks).sum(0))
    return ArrivingSums(downloads.fetch_array(torch.cat(parts)), len(parts))
