"""Groups of experts in the compiled operation, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_groups import Groups, chosen_experts, drawn_groups, exact_corrections, exact_rows, exact_weights
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.packing import pack, pack_gated

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu
HIDDEN, INNER = 32, 4
SUM_OF_INNER = INNER / 2 / (1 + torch.tensor(-0.5).exp().item())
"""Of silu(1/2) * 1"""


def weights_of_experts(logits: torch.Tensor, per_token: int, groups: Groups, **options: Any) -> torch.Tensor:
    """The weight of each expert for each token [T, experts]; 0 for experts that were not chosen.

    Number i of what expert i computes is SUM_OF_INNER. Its other numbers are 0.
    """
    num_experts = logits.shape[1]
    gate_up = torch.ones(2 * INNER, HIDDEN) / HIDDEN
    gate_up[:INNER] /= 2
    downs = torch.zeros(num_experts, HIDDEN, INNER)
    downs[range(num_experts), range(num_experts)] = 1
    settings = {"normalized": False, "alpha": None, "limit": None} | options
    out = ops.experts(
        torch.ones(len(logits), HIDDEN), logits, [pack_gated(gate_up)] * num_experts, [pack(down) for down in downs],
        [], [], INNER, per_token, num_groups=groups.count, groups_per_token=groups.per_token, **settings,
    )  # fmt: skip
    return out[:, :num_experts] / SUM_OF_INNER


@settings(max_examples=100, deadline=None)
@given(data=st.data(), groups=drawn_groups(), corrected=st.sampled_from([None, "sigmoids", "softmax"]))
def test_the_choice_is_that_of_the_definition(data: st.DataObject, groups: Groups, corrected: str | None) -> None:
    per_token = data.draw(st.integers(1, groups.experts_per_token))
    seed, rows = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 70))
    sigmoids = corrected == "sigmoids"
    logits = exact_rows(seed, rows, groups.num_experts)
    weights = exact_weights(logits, sigmoids=sigmoids)
    corrections = None if corrected is None else exact_corrections(seed, groups.num_experts)
    ranked = weights if corrections is None else weights + corrections
    expected = torch.zeros_like(weights)
    for token, row in enumerate(ranked.tolist()):
        chosen = chosen_experts(row, per_token, groups, 1 if corrected is None else 2)
        expected[token, chosen] = weights[token, chosen] * 2.5
    options = {"sigmoids": sigmoids, "corrections": corrections, "scale": 2.5}
    found = weights_of_experts(logits, per_token, groups, **options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, groups = torch.randn(300, 32, generator=generator), Groups(8, 3, 4)
    corrections = torch.randn(32, generator=generator)
    for options in ({}, {"sigmoids": True, "corrections": corrections, "normalized": True, "least_sum": 1e-20}):
        whole = weights_of_experts(logits, 6, groups, **options)
        assert ((whole != 0).sum(1) == 6).all()
        for rows in (slice(0, 1), slice(7, 200), slice(299, 300)):
            assert torch.equal(weights_of_experts(logits[rows], 6, groups, **options), whole[rows])


def test_experts_of_other_groups_are_not_chosen_before_those_of_minus_infinity() -> None:
    corrections = torch.full((6,), -torch.inf)
    corrections[1] = 0.5
    options = {"sigmoids": True, "corrections": corrections}
    found = weights_of_experts(torch.zeros(2, 6), 2, Groups(3, 1, 2), **options)
    assert ((found != 0).tolist()) == [[True, True, False, False, False, False]] * 2


@pytest.mark.parametrize("corrected", [False, True])
def test_a_row_of_nan_changes_no_other_row(corrected: bool) -> None:
    options = {"sigmoids": True, "corrections": torch.zeros(12)} if corrected else {}
    logits = torch.randn(9, 12, generator=torch.Generator().manual_seed(0))
    expected = weights_of_experts(logits, 4, Groups(4, 2, 3), **options)
    logits[3] = torch.nan
    found = weights_of_experts(logits, 4, Groups(4, 2, 3), **options)
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    assert found[3].isnan().any() and torch.equal(found[others], expected[others])


@pytest.mark.parametrize(
    ("groups", "per_token", "message"),
    [
        (Groups(5, 1, 2), 1, "num_groups must divide 12 experts, got 5"),
        (Groups(0, 1, 2), 1, "num_groups must divide 12 experts, got 0"),
        (Groups(4, 0, 3), 1, "a token must have 1 to 4 groups, got 0"),
        (Groups(4, 5, 3), 1, "a token must have 1 to 4 groups, got 5"),
        (Groups(4, 2, 3), 7, "2 groups of 3 experts have fewer than 7"),
        (Groups(12, 3, 1), 1, "with corrections a group must have at least 2 experts, got 1"),
    ],
)
def test_groups_that_are_refused(groups: Groups, per_token: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        weights_of_experts(torch.zeros(2, 12), per_token, groups, corrections=torch.zeros(12))


def test_without_corrections_a_group_may_have_one_expert() -> None:
    found = weights_of_experts(torch.tensor([[0.0, 2.0, 1.0, 3.0]]), 2, Groups(4, 2, 1))
    torch.testing.assert_close(found, torch.tensor([[0.0, 2.0, 1.0, 3.0]]).softmax(-1) * torch.tensor([0, 1, 0, 1]))
