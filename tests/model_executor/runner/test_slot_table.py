"""The runner's copy of the table of slots, against a table that is written one slot at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor.runner.slot_table import SlotTable
from tercet.model_executor.step import ForwardMode, StepInputs, TableUpdate

NUM_ROWS, CONTEXT = 4, 12
RANGES = st.tuples(st.integers(0, CONTEXT - 1), st.integers(1, CONTEXT)).map(
    lambda pair: (pair[0], min(pair[0] + pair[1], CONTEXT))
)


@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.integers(1, NUM_ROWS), RANGES, min_size=1),
            st.dictionaries(st.integers(1, NUM_ROWS), RANGES),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_each_step_writes_its_new_tokens_and_the_other_changes(
    steps: list[tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]],
) -> None:
    """Of each row, a step has new tokens at some positions, and other slots before them have changed."""
    table, expected, next_slot = SlotTable(NUM_ROWS, CONTEXT, torch.device("cpu")), {}, 1

    def slots(row: int, start: int, end: int) -> np.ndarray:
        nonlocal next_slot
        new = np.arange(next_slot, next_slot + end - start, dtype=np.int32)
        expected.update({(row, start + i): slot for i, slot in enumerate(new.tolist())})
        next_slot += len(new)
        return new

    for new_tokens, changes in steps:
        updates = [
            TableUpdate(row, start, slots(row, start, min(end, new_tokens[row][0])))
            for row, (start, end) in changes.items()
            if row in new_tokens and start < new_tokens[row][0]
        ]
        step = StepInputs(
            ForwardMode.EXTEND,
            np.array(list(new_tokens), np.int32),
            np.array([end for _, end in new_tokens.values()], np.int32),
            np.concatenate([slots(row, start, end) for row, (start, end) in new_tokens.items()]),
            table_updates=updates,
            extend_lens=np.array([end - start for start, end in new_tokens.values()], np.int32),
        )
        table.write(*map(torch.from_numpy, table.changes(step, step.positions)))
        assert {(row, at): int(table.tensor[row, at]) for row, at in expected} == expected
        assert int(torch.count_nonzero(table.tensor)) == len(expected)
