"""Edges that random numbers do not find: thresholds and draws that are met exactly."""

from __future__ import annotations

import pytest
import torch

from tercet.model_executor.sampling.joint_sampling import MAX_VOCAB_SIZE, choose_open, choose_ranked, weigh

JUST_BELOW_1 = 1 - 2.0**-53
INF = torch.inf


def column(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


@pytest.mark.parametrize(("draw", "token"), [(0.0, 1), (0.4999, 1), (0.5, 3), (JUST_BELOW_1, 3)])
def test_a_draw_on_the_edge_belongs_to_the_next_token_that_has_a_chance(draw: float, token: int) -> None:
    gap = torch.tensor([[INF, 0.0, INF, 0.0, INF]])
    assert choose_open(gap, column(draw), None).tolist() == [token]
    infinite = column(INF, dtype=torch.float32)
    all_five, no_limit = column(5, dtype=torch.int64), column(2**62, dtype=torch.int64)
    assert choose_ranked((5,), gap, column(draw), all_five, no_limit, infinite).tolist() == [token]


def test_mass_that_is_met_exactly_needs_no_further_token() -> None:
    gap = torch.tensor([[1.0, 0.0, 2.0]])
    mass = weigh(gap)[:, 1:2]
    args = (gap, column(JUST_BELOW_1), column(3, dtype=torch.int64))
    no_min_p = column(INF, dtype=torch.float32)
    assert choose_ranked((3,), *args, mass, no_min_p).tolist() == [1]
    assert choose_ranked((3,), *args, mass + 1, no_min_p).tolist() == [0]


@pytest.mark.parametrize("widths", [(1, 2, 5), (2, 5), (3, 5), (5,)])
def test_ties_beyond_the_width_are_found(widths: tuple[int, ...]) -> None:
    gap = torch.tensor([[3.0, 0.5, 0.0, 0.5, 0.5]])
    mass = weigh(torch.zeros(1, 1)) + 1  # completed by the first of three equal tokens
    draw = column(JUST_BELOW_1)
    for top_k, last in [(1, 2), (2, 1), (3, 3), (4, 4), (5, 4)]:
        k = column(top_k, dtype=torch.int64)
        assert choose_ranked(widths, gap, draw, k, mass, column(INF, dtype=torch.float32)).tolist() == [last]


def test_the_flattest_distribution_of_the_largest_vocabulary_is_summed_exactly() -> None:
    gap = torch.zeros(1, MAX_VOCAB_SIZE)
    for draw, token in [(0.0, 0), (0.5, MAX_VOCAB_SIZE // 2), (JUST_BELOW_1, MAX_VOCAB_SIZE - 1)]:
        assert choose_open(gap, column(draw), None).tolist() == [token]
