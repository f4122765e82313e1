"""A runner's own table from (row, position) to slot, on its device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..step import Int32Array, StepInputs, TableUpdate


class SlotTable:
    """`tensor`: int32 [num_rows + 1, context_len]. What a row holds beyond its request is stale."""

    def __init__(self, num_rows: int, context_len: int, device: torch.device) -> None:
        # On a CPU zeros are mapped, not written: a row costs memory once it is used.
        self.tensor = torch.zeros((num_rows + 1, context_len), dtype=torch.int32, device=device)
        self._flat = self.tensor.view(-1)
        self._context_len = context_len

    def changes(self, step: StepInputs, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """Everything that an EXTEND step changes: places in the flattened table, and the slots that belong there.

        `positions`: int64 [T] of the step's new tokens.
        """
        assert step.extend_lens is not None
        new = np.repeat(step.rows.astype(np.int64) * self._context_len, step.extend_lens) + positions
        places, slots = self.places(step.table_updates)
        return np.concatenate((places, new)), np.concatenate((slots, step.out_cache_loc))

    def places(self, updates: Sequence[TableUpdate]) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """The same for the updates alone."""
        if not updates:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        starts = [update.row * self._context_len + update.start for update in updates]
        places = [np.arange(start, start + len(update.slots)) for start, update in zip(starts, updates, strict=True)]
        return np.concatenate(places), np.concatenate([update.slots for update in updates])

    def write(self, places: torch.Tensor, slots: torch.Tensor) -> None:
        """`places`: int64 [n] on the device, as `changes` gives them; `slots`: int32 [n]. Places that repeat have the
        same slot."""
        self._flat.index_copy_(0, places, slots)

    def write_next(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """One slot for each row; int64 [B] each, on the device. May be recorded in a graph."""
        self.write(rows * self._context_len + positions, slots.int())
