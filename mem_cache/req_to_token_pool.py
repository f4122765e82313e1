"""The table from (request, position) to slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class ReqToTokenPool:
    """A fixed number of rows, one for each running request; a row names the slot of each of its positions.

    `req_to_token`: int32 [num_rows + 1, context_len]. Row 0 is never given out and stays all zeros: padded
    batch entries point at it and so at the dummy slot 0. What a row holds past the request's length is stale
    and must not be read.
    """

    def __init__(self, num_rows: int, context_len: int) -> None:
        """Raises ValueError when either size is below 1."""
        if num_rows < 1 or context_len < 1:
            raise ValueError(f"num_rows and context_len must be at least 1, got {num_rows} and {context_len}")
        self.num_rows = num_rows
        self.context_len = context_len
        # np.zeros maps memory without touching it: a row costs nothing until it is first written.
        self.req_to_token: npt.NDArray[np.int32] = np.zeros((num_rows + 1, context_len), dtype=np.int32)
        self._free_rows: list[int] = []
        self._is_free = bytearray()
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
