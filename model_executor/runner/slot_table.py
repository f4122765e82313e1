"""The runner's copy of the table from (row, position) to slot, on its device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...srt.machine.huge_pages import zeroed
from ..step import Int32Array, StepInputs, TableUpdate


def make_slot_table(num_rows: int, context_len: int, device: torch.device) -> SlotTable:
    """Make the table of a server's settings. Raises ValueError that names them if there is no memory for it."""
    try:
        return SlotTable(num_rows, context_len, device)
    except (OSError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"no memory for a table of --max-running-requests {num_rows} times --context-length {context_len} "
            "positions; lower one of them"
        ) from error


class SlotTable:
    """The table of slots. `tensor`: int32 [num_rows + 1, context_len]. Positions beyond a request hold old numbers."""

    def __init__(self, num_rows: int, context_len: int, device: torch.device) -> None:
        shape = num_rows + 1, context_len
        if device.type == "cpu":
            # An unused row costs no memory. torch.zeros writes all, as does np.zeros on freed memory of the heap.
            self.tensor = torch.from_numpy(zeroed(4 * math.prod(shape)).view(np.int32).reshape(shape))
        else:
            self.tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self._flat = self.tensor.view(-1)
        self._context_len = context_len

    def changes(self, step: StepInputs, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """The changes of the table by an EXTEND step: indices into the flattened table, and the new slots.

        `positions`: int64 [T], positions of the step's new tokens.
        """
        assert step.extend_lens is not None
        new = np.repeat(step.rows.astype(np.int64) * self._context_len, step.extend_lens) + positions
        places, slots = self.places(step.table_updates)
        return np.concatenate((places, new)), np.concatenate((slots, step.out_cache_loc))

    def places(self, updates: Sequence[TableUpdate]) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """The changes of the table by `updates`, in the form of `changes`."""
        if not updates:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        starts = [update.row * self._context_len + update.start for update in updates]
        places = [np.arange(start, start + len(update.slots)) for start, update in zip(starts, updates, strict=True)]
        return np.concatenate(places), np.concatenate([update.slots for update in updates])

    def write(self, places: torch.Tensor, slots: torch.Tensor) -> None:
        """Write slots: int32 [n] at places: int64 [n], both on the device, in the form of `changes`.

        Equal places must have equal slots.
        """
        self._flat.index_copy_(0, places, slots)
