"""The table from (request, position) to slot, and the record of changes that runners have not got yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..srt.arrays import Int32Array


class TableUpdate(NamedTuple):
    """The slots of positions [start, start + len(slots)) of one row; `slots`: int32 [n]."""

    row: int
    start: int
    slots: Int32Array


class ReqToTokenPool:
    """The scheduler's table of slots. Each admitted request has a row with the slot of each of its positions.

    `req_to_token`: int32 [num_rows + 1, context_len]. Any code may read it, but only the methods write it. Row 0 is
    never allocated and stays all zeros: padded batch entries use it and so the dummy slot 0. Positions beyond the
    length of a request hold old numbers, which must not be read.

    A runner has its own copy of the table, on a device or in another process. Each step names the slots of its new
    tokens (`write_new`, `write_next`); all other changes reach the runner through `take_updates`.
    """

    def __init__(self, num_rows: int, context_len: int) -> None:
        """Raises ValueError when either size is below 1."""
        if num_rows < 1 or context_len < 1:
            raise ValueError(f"num_rows and context_len must be at least 1, got {num_rows} and {context_len}")
        self.num_rows = num_rows
        self.context_len = context_len
        # np.zeros takes memory only where it is written: an unused row costs none.
        self.req_to_token: Int32Array = np.zeros((num_rows + 1, context_len), dtype=np.int32)
        self._free_rows: list[int] = []
        self._is_free = bytearray()
        self._dirty: list[tuple[int, int, int]] = []
        self.clear()

    @property
    def num_free(self) -> int:
        """The number of free rows."""
        return len(self._free_rows)

    def alloc(self) -> int | None:
        """Allocate the row that was freed last, never row 0. Returns None when no row is free."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._is_free[row] = False
        return row

    def free(self, row: int) -> None:
        """Free a row. Its slots stay in the table."""
        assert 1 <= row <= self.num_rows and not self._is_free[row], f"row {row} is not allocated"
        self._is_free[row] = True
        self._free_rows.append(row)

    def clear(self) -> None:
        """Free all rows. The table is not zeroed, because that would write to all of its memory."""
        self._free_rows = list(range(self.num_rows, 0, -1))
        self._is_free = bytearray([False] + [True] * self.num_rows)

    def write(self, row: int, start: int, slots: Int32Array) -> None:
        """Set positions [start, start + len(slots)) of a row, and record the change for `take_updates`."""
        if len(slots):
            self.req_to_token[row, start : start + len(slots)] = slots
            self._dirty.append((row, start, start + len(slots)))

    def write_new(self, rows: Int32Array, starts: Int32Array, lens: Int32Array, slots: Int32Array) -> None:
        """Set the slots of tokens that the next EXTEND step computes. Records nothing: the step names these slots.

        Row i gets `lens[i]` of them, from position `starts[i]` on. `slots`: int32 [sum(lens)], the others int32 [B].
        """
        first = np.cumsum(lens) - lens
        positions = np.repeat(starts - first, lens)
        positions += np.arange(len(slots))
        self.req_to_token[np.repeat(rows, lens), positions] = slots

    def write_next(self, rows: Int32Array, positions: Int32Array, slots: Int32Array) -> None:
        """Set the slot of one new token of each row, for a DECODE step. All arguments are int32 [B]."""
        self.req_to_token[rows, positions] = slots

    def take_updates(self) -> list[TableUpdate]:
        """The changes made by `write` since the last call. They belong to the step that is built next."""
        dirty, self._dirty = self._dirty, []
        # Read from the table now: two owners of a row may have written the same positions since the last step.
        return [TableUpdate(row, start, self.req_to_token[row, start:end].copy()) for row, start, end in dirty]
