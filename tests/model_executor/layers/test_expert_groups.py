"""Groups of experts in plain torch, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expert_groups import Groups, chosen_experts, drawn_groups, exact_corrections, exact_rows, exact_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from tercet.model_executor.layers.experts import choose_experts
from tercet.srt.model_files.experts_config import ExpertsConfig
from tercet.srt.model_files.experts_deepseek import deepseek_v2_experts, deepseek_v3_experts, glm_experts
from tercet.srt.model_files.settings import Settings


def config_of(
    groups: Groups, per_token: int, *, sigmoids: bool = False, corrected: bool = False, normalized: bool = False
) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=groups.num_experts,
        num_experts_per_token=per_token,
        intermediate_size=8,
        normalized=normalized,
        has_sigmoids=sigmoids,
        has_corrections=corrected,
        scale=2.5,
        num_groups=groups.count,
        groups_per_token=groups.per_token,
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), groups=drawn_groups(), corrected=st.sampled_from([None, "sigmoids", "softmax"]))
def test_the_choice_is_that_of_the_definition(data: st.DataObject, groups: Groups, corrected: str | None) -> None:
    per_token = data.draw(st.integers(1, groups.experts_per_token))
    seed, rows = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 20))
    sigmoids, normalized = corrected == "sigmoids", data.draw(st.booleans())
    logits = exact_rows(seed, rows, groups.num_experts)
    weights = exact_weights(logits, sigmoids=sigmoids)
    corrections = None if corrected is None else exact_corrections(seed, groups.num_experts)
    ranked = weights if corrections is None else weights + corrections
    config = config_of(groups, per_token, sigmoids=sigmoids, corrected=corrected is not None, normalized=normalized)
    found = choose_experts(logits, config, corrections)
    expected = [chosen_experts(row, per_token, groups, 1 if corrected is None else 2) for row in ranked.tolist()]
    assert found.experts.sort(-1).values.tolist() == expected
    of_chosen = weights.gather(1, found.experts).double()
    if normalized:
        least = 1e-20 if corrected else 0.0  # the probabilities of all experts of some groups may be 0
        of_chosen /= of_chosen.sum(-1, keepdim=True).clamp(min=least)
    torch.testing.assert_close(found.weights.double(), of_chosen * 2.5, rtol=1e-6, atol=0, equal_nan=True)


V2 = {
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
GLM = {"n_routed_experts": 24, "num_experts_per_tok": 5, "n_group": 6, "topk_group": 2, "norm_topk_prob": False}


@pytest.mark.parametrize(
    ("read", "kind", "router", "keys"),
    [
        (deepseek_v2_experts, DeepseekV2Config, DeepseekV2TopkRouter, V2),
        (deepseek_v2_experts, DeepseekV2Config, DeepseekV2TopkRouter, V2 | {"topk_method": "greedy"}),
        (deepseek_v3_experts, DeepseekV3Config, DeepseekV3TopkRouter, {}),
        (glm_experts, Glm4MoeConfig, Glm4MoeTopkRouter, GLM),
    ],
)
def test_the_choice_is_that_of_transformers(read: Any, kind: Any, router: Any, keys: dict[str, Any]) -> None:
    theirs = kind(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, **keys)
    config = read(Settings("config.json", theirs.to_dict()), 4)
    assert config.num_groups == (1 if keys.get("topk_method") == "greedy" else theirs.n_group)
    generator = torch.Generator().manual_seed(0)
    router = router(theirs)
    torch.nn.init.normal_(router.weight, generator=generator)
    corrections = None
    if config.has_corrections:
        corrections = torch.nn.init.normal_(router.e_score_correction_bias, 0, 0.2, generator=generator)
    with torch.no_grad():
        logits, weights, experts = router(torch.randn(300, 64, generator=generator) / 8)
        found = choose_experts(logits, config, corrections)
    order, of_theirs = found.experts.argsort(-1), experts.argsort(-1)
    assert torch.equal(found.experts.gather(1, order), experts.gather(1, of_theirs))
    torch.testing.assert_close(found.weights.gather(1, order), weights.gather(1, of_theirs), rtol=1e-5, atol=0)


def test_the_score_of_a_group_is_its_largest_probability() -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8, 1.0, 1.0]])
    groups = Groups(3, 1, 2)
    assert choose_experts(logits, config_of(groups, 2)).experts.tolist() == [[0, 1]]


def test_with_corrections_the_score_is_the_sum_of_the_two_largest() -> None:
    logits = torch.tensor([[3.0, 0.0, 2.9, 2.8, 1.0, 1.0]])
    config = config_of(Groups(3, 1, 2), 2, sigmoids=True, corrected=True)
    assert choose_experts(logits, config, torch.zeros(6)).experts.tolist() == [[2, 3]]
    corrections = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert choose_experts(logits, config, corrections).experts.tolist() == [[1, 0]]


def test_experts_of_other_groups_are_not_chosen_before_those_of_minus_infinity() -> None:
    corrections = torch.full((6,), -torch.inf)
    corrections[1] = 0.5
    config = config_of(Groups(3, 1, 2), 2, sigmoids=True, corrected=True)
    found = choose_experts(torch.zeros(2, 6), config, corrections)
    assert found.experts.tolist() == [[1, 0]] * 2


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 32, generator=generator)
    for corrected in (False, True):
        config = config_of(Groups(8, 3, 4), 6, sigmoids=corrected, corrected=corrected, normalized=corrected)
        corrections = torch.randn(32, generator=generator) if corrected else None
        whole = choose_experts(logits, config, corrections)
        for rows in (slice(0, 1), slice(7, 200), slice(299, 300)):
            part = choose_experts(logits[rows], config, corrections)
            assert torch.equal(part.experts, whole.experts[rows])
            assert torch.equal(part.weights, whole.weights[rows])
