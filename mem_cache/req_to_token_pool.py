"""The table from (request, position) to slot, and what of it a runner has not seen yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class TableUpdate(NamedTuple):
    """The slots of positions [start, start + len(slots)) of one row; `slots`: int32 [n]."""

    row: int
    start: int
    slots: Int32Array


class ReqToTokenPool:
    """A fixed number of rows, one for each running request; a row names the slot of each of its positions.

    `req_to_token`: int32 [num_rows + 1, context_len], to be read by anybody and written by the methods alone. Row 0 is
    never given out and stays all zeros: padded batch entries point at it and so at the dummy slot 0. A row beyond the
    length of its request holds stale numbers that must not be read.

    A runner has a table of its own, which may lie on a device or in another process. It learns the slots of a step's
    new tokens from the step itself (`write_new`, `write_next`), everything else from `take_updates`.
    """

    def __init__(self, num_rows: int, context_len: int) -> None:
        """Raises ValueError when either size is below 1."""
        if num_rows < 1 or context_len < 1:
            raise ValueError(f"num_rows and context_len must be at least 1, got {num_rows} and {context_len}")
        self.num_rows = num_rows
        self.context_len = context_len
        # np.zeros maps memory without touching it: a row costs nothing until it is first written.
        self.req_to_token: Int32Array = np.zeros((num_rows + 1, context_len), dtype=np.int32)
        self._free_rows: list[int] = []
        self._is_free = bytearray()
        self._dirty: list[tuple[int, int, int]] = []
        self.clear()

    @property
    def num_free(self) -> int:
        """Rows that can be allocated now."""
        return len(self._free_rows)

    def alloc(self) -> int | None:
        """Take one row (never row 0), the most recently freed first; None when every row is taken."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._is_free[row] = False
        return row

    def free(self, row: int) -> None:
        """Give a row back. Its contents are left as they are."""
        assert 1 <= row <= self.num_rows and not self._is_free[row], f"row {row} is not allocated"
        self._is_free[row] = True
        self._free_rows.append(row)

    def clear(self) -> None:
        """Make every row free. The table is not wiped: its pages would all have to be touched."""
        self._free_rows = list(range(self.num_rows, 0, -1))
        self._is_free = bytearray([False] + [True] * self.num_rows)

    def write(self, row: int, start: int, slots: Int32Array) -> None:
        """Set positions [start, start + len(slots)) of a row. Runners learn of it by `take_updates`."""
        if len(slots):
            self.req_to_token[row, start : start + len(slots)] = slots
            self._dirty.append((row, start, start + len(slots)))

    def write_new(self, row: int, start: int, slots: Int32Array) -> None:
        """`write` for tokens that the next step computes, in an EXTEND step: the step itself names their slots."""
        self.req_to_token[row, start : start + len(slots)] = slots

    def write_next(self, rows: Int32Array, positions: Int32Array, slots: Int32Array) -> None:
        """`write_new` for one token of each row; all int32 [B]."""
        self.req_to_token[rows, positions] = slots

    def take_updates(self) -> list[TableUpdate]:
        """What `write` has changed since the last call, for the step that is built next."""
        dirty, self._dirty = self._dirty, []
        # As the table is now: two owners of a row may have written the same positions since the last step.
        return [TableUpdate(row, start, self.req_to_token[row, start:end].copy()) for row, start, end in dirty]
