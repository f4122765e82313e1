"""The sampling parameters of each row, in a numpy table on the host and a copy on the device.

The host's table answers questions such as "does any row of this batch need top-p?" without waiting for the device. The
device gets a row's parameters once, when the row gets a new owner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..device.accelerator import make_accelerator
from ..device.device_buffers import Uploads
from ..kernels.sampling_layout import Column
from ..step import NewRow

__all__ = ["SMALL_TOP_K", "Column", "Groups", "SamplingState"]

SMALL_TOP_K = 1024
"""Up to this top-k only the k most probable tokens are ranked. Above it the vocabulary is ranked as for top-p."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


@dataclass(slots=True, frozen=True)
class Groups:
    """The positions in a batch, int64 each, grouped by the way in which their tokens are chosen."""

    greedy: npt.NDArray[np.int64]
    open: npt.NDArray[np.int64]
    """Sampled without top-k and top-p, with or without min_p."""
    small_top_k: npt.NDArray[np.int64]
    """Sampled with a top-k of at most SMALL_TOP_K, with or without top-p. Sorted by top-k."""
    ranked: npt.NDArray[np.int64]
    """Sampled with top-p or a large top-k. The number of kept tokens is not known before."""


class Kinds(NamedTuple):
    """What kinds of row a batch has."""

    any_sampled: bool
    """a row that is not greedy"""
    any_ranked: bool
    """a row that is not greedy, with top-k or top-p"""


class SamplingState:
    """The parameters of rows 0..num_rows. Row 0 is padding and greedy."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, uploads: Uploads | None = None) -> None:
        self._vocab_size = vocab_size
        self._uploads = uploads or Uploads(device, make_accelerator(device))
        # float64 holds every column exactly, top-k included.
        self.host = np.zeros((num_rows + 1, len(Column)), np.float64)
        self.host[:] = (1.0, vocab_size, 1.0, math.inf, 1.0, 0.0, 0.0, 1.0)
        self.table = self.send(self.host.copy())
        """[num_rows + 1, columns], float64, the device's copy of `host` as of the last `flush`"""
        self._seeds = np.zeros(num_rows + 1, np.int64)
        self.host_tensors = torch.from_numpy(self.host), torch.from_numpy(self._seeds)
        """`host`, and the seed of each row, int64 [num_rows + 1]: the same memory as tensors."""
        self._greedy = np.ones(num_rows + 1, np.bool_)
        self._not_greedy: set[int] = set()
        """The rows whose last owner is not greedy."""
        self._changed: set[int] = set()

    def set_row(self, new_row: NewRow) -> None:
        """Set the parameters of a row's new owner. The device gets them at the next `flush`."""
        params = new_row.sampling
        row = new_row.row
        greedy = params.is_greedy
        self.host[row] = (
            # Finite in float32: a logit of -inf divided by it must stay -inf.
            1.0 if greedy else min(params.temperature, _FLOAT32_MAX),
            self._vocab_size if params.top_k == -1 else min(params.top_k, self._vocab_size),
            params.top_p,
            # abs: a min_p of 1 must give 0.0 and not -0.0, because kernels compare gaps by their bits.
            math.inf if params.min_p == 0 else abs(math.log(params.min_p)),
            # Not 0 in float32, because 0 / 0 is NaN.
            max(params.repetition_penalty, _FLOAT32_TINY),
            params.frequency_penalty,
            params.presence_penalty,
            float(greedy),
        )
        self._seeds[row] = new_row.seed
        self._greedy[row] = greedy
        (self._not_greedy.discard if greedy else self._not_greedy.add)(row)
        self._changed.add(row)

    def flush(self) -> None:
        """Send the changed rows to the device in one copy. Does nothing if no row has changed."""
        if not self._changed:
            return
        rows = np.fromiter(self._changed, np.int64, len(self._changed))
        self._changed.clear()
        self.table.index_copy_(0, *self.send_all(rows, self.host[rows]))

    def send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Send an array to the device without waiting. The caller must not use the array afterwards."""
        return self._uploads.send(array)[0]

    def send_all(self, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Send several arrays in one transfer, as `send` does."""
        return self._uploads.send(*arrays)

    def on_device(self, rows: torch.Tensor, column: Column) -> torch.Tensor:
        """One parameter of the rows: float64 [n, 1]. rows: int64 [n] on the device."""
        return self.table[:, column].index_select(0, rows).unsqueeze(1)

    def seeds(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._seeds[rows]

    def all_greedy(self, rows: npt.NDArray[np.integer]) -> bool:
        """Whether a batch has only greedy rows."""
        return self._not_greedy.isdisjoint(rows.tolist())

    def kinds(self, rows: npt.NDArray[np.int64]) -> Kinds:
        """What kinds of row a batch has. rows: int64 [n]."""
        sampled = rows[~self._greedy[rows]]
        ranked = (self.host[sampled, Column.TOP_K] < self._vocab_size) | (self.host[sampled, Column.TOP_P] < 1)
        return Kinds(len(sampled) > 0, bool(ranked.any()))

    def group(self, rows: npt.NDArray[np.int64]) -> Groups:
        """Group the positions of a batch by the way in which their tokens are chosen. rows: int64 [n]."""
        sampled = ~self._greedy[rows]
        top_k = self.host[rows, Column.TOP_K]
        small_top_k = sampled & (top_k <= SMALL_TOP_K) & (top_k < self._vocab_size)
        ranked = sampled & ~small_top_k & ((top_k < self._vocab_size) | (self.host[rows, Column.TOP_P] < 1))
        few_positions = np.flatnonzero(small_top_k)
        return Groups(
            greedy=np.flatnonzero(~sampled),
            open=np.flatnonzero(sampled & ~small_top_k & ~ranked),
            small_top_k=few_positions[np.argsort(top_k[few_positions], kind="stable")],
            ranked=np.flatnonzero(ranked),
        )
