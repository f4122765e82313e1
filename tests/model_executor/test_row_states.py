from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor.row_states import LayerStates, copy_states, independent_copies


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_copies_have_the_effect_of_one_after_another(copies: list[tuple[int, int]]) -> None:
    states = [LayerStates(torch.arange(12.0).view(6, 2), torch.arange(6.0).view(6, 1)) for _ in range(2)]
    expected = [[tensor.clone() for tensor in layer] for layer in states]
    for source, target in copies:
        for layer in expected:
            for tensor in layer:
                tensor[target] = tensor[source].clone()
    sources, targets = (np.array([pair[index] for pair in copies], np.int32) for index in (0, 1))
    groups = list(independent_copies(sources, targets))
    for of_group in groups:
        copy_states(states, *map(torch.from_numpy, of_group))
        read, written = (rows.tolist() for rows in of_group)
        assert len(set(written)) == len(written), "a GPU writes them at once"
        assert all(source not in written[:index] for index, source in enumerate(read)), "a GPU reads all of them first"
    for layer, wanted in zip(states, expected, strict=True):
        for tensor, right in zip(layer, wanted, strict=True):
            assert torch.equal(tensor, right)
    assert sum(len(group[0]) for group in groups) == len(copies)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_copies_on_any_device(device: str) -> None:
    """On a GPU there is no loop, which would wait for the numbers of the rows."""
    state = LayerStates(torch.arange(6.0, device=device).view(3, 2), torch.arange(3.0, device=device).view(3, 1))
    copy_states([state], torch.tensor([1, 1], device=device), torch.tensor([2, 0], device=device))
    if device == "cpu":
        assert [tensor.tolist() for tensor in state] == [[[2, 3]] * 3, [[1]] * 3]


def test_copies_of_different_rows_are_one_group() -> None:
    groups = list(independent_copies(np.array([1, 2, 1], np.int32), np.array([3, 4, 5], np.int32)))
    assert [[array.tolist() for array in group] for group in groups] == [[[1, 2, 1], [3, 4, 5]]]
