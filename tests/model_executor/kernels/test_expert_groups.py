"""Groups of experts in the kernel of the choice, in Triton's interpreter, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_groups import Groups, chosen_experts, drawn_groups, exact_corrections, exact_rows, exact_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples, permuted_programs, used_memory

from tercet.model_executor.kernels.expert_choice import ExpertPairs, choose_experts, choose_experts_ref


def choice(choose: Any, logits: torch.Tensor, per_token: int, groups: Groups, **options: Any) -> ExpertPairs:
    """The choice of a router with these logits."""
    settings = {"normalized": False, "tile_rows": 16} | options
    router = torch.eye(logits.shape[1])
    return choose(logits, router, per_token, num_groups=groups.count, groups_per_token=groups.per_token, **settings)


@settings(max_examples=examples(12), deadline=None)
@given(data=st.data(), groups=drawn_groups(), corrected=st.sampled_from([None, "sigmoids", "softmax"]))
def test_the_choice_is_that_of_the_definition(data: st.DataObject, groups: Groups, corrected: str | None) -> None:
    per_token = data.draw(st.integers(1, min(groups.experts_per_token, 5)))
    seed, rows = data.draw(st.integers(0, 2**31)), data.draw(st.integers(1, 40))
    sigmoids = corrected == "sigmoids"
    logits = exact_rows(seed, rows, groups.num_experts)
    weights = exact_weights(logits, sigmoids=sigmoids)
    corrections = None if corrected is None else exact_corrections(seed, groups.num_experts)
    options = {"sigmoids": sigmoids, "corrections": corrections, "scale": 2.5}
    with permuted_programs(seed), used_memory(seed):
        found = choice(choose_experts, logits, per_token, groups, **options)
    twin = choice(choose_experts_ref, logits, per_token, groups, **options)
    ranked = weights if corrections is None else weights + corrections
    expected = [chosen_experts(row, per_token, groups, 1 if corrected is None else 2) for row in ranked.tolist()]
    assert found.experts.tolist() == twin.experts.tolist() == expected
    for pairs in (found, twin):
        torch.testing.assert_close(pairs.weights, weights.gather(1, found.experts.long()) * 2.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [5, 50])
def test_a_token_has_as_many_experts_as_it_should_have(rows: int) -> None:
    """Where groups have corrections of -inf only, and in a row of NaN."""
    corrections = torch.full((8,), -torch.inf)
    corrections[5] = 0.5
    logits = torch.zeros(rows, 8)
    logits[1] = torch.nan
    found = choice(choose_experts, logits, 4, Groups(4, 2, 2), sigmoids=True, corrections=corrections)
    assert found.experts.tolist() == [[0, 1, 2, 3]] * rows
    assert found.order.sort().values.tolist() == list(range(4 * rows))
