"""Fake states of recurrent layers: a state is the KV of all tokens before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tercet.model_executor.step import StateCopies, StepInputs


class FakeStates:
    """The states of rows. A request that continues another prefix than its own is an error."""

    def __init__(self, num_rows: int) -> None:
        self._of_row = [b"nothing"] * num_rows

    def copy(self, copies: StateCopies) -> None:
        for source, target in zip(copies.sources.tolist(), copies.targets.tolist(), strict=True):
            self._of_row[target] = self._of_row[source]

    def run(self, step: StepInputs, lens: np.ndarray, kv_of: Callable[[int, int], np.ndarray]) -> None:
        """Computes the tokens of a step. `lens`: [B], new tokens of each row. `kv_of(row, end)`: int64 [end]."""
        if step.state_copies is not None:
            self.copy(step.state_copies)
        saves, nothing = step.state_saves, np.zeros_like(step.rows)
        saved = (nothing, nothing) if saves is None else (saves.lens, saves.rows)
        of_rows = (each.tolist() for each in (step.rows, step.seq_lens, lens, *saved))
        for row, end, length, saved_len, saved_row in zip(*of_rows, strict=True):
            kv, start = kv_of(row, end), end - length
            if start:
                assert self._of_row[row] == kv[:start].tobytes(), f"row {row} continues a wrong state"
            self._of_row[row] = kv.tobytes()
            if saved_len:
                assert start < saved_len <= end, "a state is saved after a token of the step"
                self._of_row[saved_row] = kv[:saved_len].tobytes()
