"""The experts of DeepSeek V2 and V3 and of models that follow them, which may be in groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

from tercet.srt.model_files.experts_config import ExpertsConfig, ReadExperts, SharedExpert
from tercet.srt.model_files.experts_deepseek import (
    deepseek_gguf_experts,
    deepseek_v2_experts,
    deepseek_v3_experts,
    dots_experts,
    glm_experts,
    glm_gguf_experts,
)
from tercet.srt.model_files.settings import Settings

V3 = ExpertsConfig(
    num_experts=256,
    num_experts_per_token=8,
    intermediate_size=2048,
    normalized=True,
    has_sigmoids=True,
    has_corrections=True,
    scale=2.5,
    num_groups=8,
    groups_per_token=4,
    dense_layers=(0, 1, 2),
    shared=SharedExpert(2048, has_gate=False),
)
V2 = ExpertsConfig(
    num_experts=160,
    num_experts_per_token=6,
    intermediate_size=1536,
    normalized=False,
    scale=16.0,
    num_groups=8,
    groups_per_token=3,
    dense_layers=(0,),
    shared=SharedExpert(3072, has_gate=False),
)
NO_GROUPS = {"num_groups": 1, "groups_per_token": 1}
# The keys of DeepSeek-V2-Chat.
V2_KEYS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3_KEYS: dict[str, Any] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
GGUF_V3: dict[str, Any] = {
    "expert_count": 256,
    "expert_used_count": 8,
    "expert_feed_forward_length": 2048,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 8,
    "expert_group_used_count": 4,
    "leading_dense_block_count": 3,
}
GGUF_V2 = GGUF_V3 | {
    "expert_count": 160,
    "expert_used_count": 6,
    "expert_feed_forward_length": 1536,
    "expert_shared_count": 2,
    "expert_weights_scale": 16.0,
    "expert_weights_norm": False,
    "expert_gating_func": 1,
    "expert_group_used_count": 3,
    "leading_dense_block_count": 1,
}
V2_REQUIRED = {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}


def read(reader: ReadExperts, keys: dict[str, Any], num_layers: int = 61) -> ExpertsConfig | None:
    return reader(Settings("config.json", keys), num_layers)


def test_published_models() -> None:
    assert read(deepseek_v3_experts, V3_KEYS) == V3
    assert read(deepseek_v2_experts, V2_KEYS) == V2
    lite = V2_KEYS | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    assert read(deepseek_v2_experts, lite) == replace(V2, scale=1.0, **NO_GROUPS)
    assert read(deepseek_gguf_experts, GGUF_V3) == V3
    assert read(deepseek_gguf_experts, GGUF_V2) == V2
    without_function = {key: value for key, value in GGUF_V2.items() if key != "expert_gating_func"}
    assert read(deepseek_gguf_experts, without_function) == V2


@pytest.mark.parametrize(
    ("reader", "given", "kind"),
    [(deepseek_v3_experts, {}, DeepseekV3Config), (deepseek_v2_experts, V2_REQUIRED, DeepseekV2Config)],
)
def test_defaults_are_those_of_transformers(
    reader: ReadExperts, given: dict[str, Any], kind: type[PreTrainedConfig]
) -> None:
    experts, theirs = read(reader, given), kind(**given)
    assert experts is not None and experts == read(reader, theirs.to_dict())
    assert experts.shared == SharedExpert(theirs.n_shared_experts * theirs.moe_intermediate_size, has_gate=False)
    assert experts.dense_layers == tuple(range(theirs.first_k_dense_replace))


def test_groups_are_read() -> None:
    keys = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    gguf = GGUF_V3 | {"expert_count": 12, "expert_used_count": 4, "expert_group_count": 4, "expert_group_used_count": 2}
    for reader, given in ((glm_experts, keys), (dots_experts, keys), (glm_gguf_experts, gguf)):
        experts = read(reader, given)
        assert experts is not None and (experts.num_groups, experts.groups_per_token) == (4, 2)


def test_a_token_with_all_groups_needs_none() -> None:
    assert read(deepseek_v3_experts, {"topk_group": 8}) == replace(V3, **NO_GROUPS)
    assert read(deepseek_gguf_experts, GGUF_V2 | {"expert_group_used_count": 8}) == replace(V2, **NO_GROUPS)
    assert read(deepseek_v2_experts, V2_KEYS | {"topk_method": "greedy"}) == replace(V2, **NO_GROUPS)


@pytest.mark.parametrize(
    ("reader", "keys", "message"),
    [
        (deepseek_v3_experts, {"n_group": 7}, r"n_group must be a divisor of n_routed_experts \(256\), got 7"),
        (deepseek_v3_experts, {"topk_group": 9}, "topk_group must be an integer from 1 to 8, got 9"),
        (
            deepseek_v3_experts,
            {"num_experts_per_tok": 200},
            "num_experts_per_tok must be at most 128, the experts of 4 groups, got 200",
        ),
        (
            deepseek_v3_experts,
            {"n_group": 256, "topk_group": 200},
            "n_group must be at most 128, so that each group has two experts, got 256",
        ),
        (deepseek_v2_experts, V2_KEYS | {"n_group": None}, "n_group must be an integer from 1"),
        (deepseek_v2_experts, V2_KEYS | {"topk_group": None}, "topk_group must be an integer from 1 to 8, got None"),
        (
            deepseek_gguf_experts,
            GGUF_V2 | {"expert_group_count": 9},
            r"expert_group_count must be a divisor of expert_count \(160\), got 9",
        ),
        (
            deepseek_gguf_experts,
            GGUF_V2 | {"expert_group_used_count": None},
            "expert_group_used_count must be an integer from 1 to 8, got None",
        ),
        (
            deepseek_gguf_experts,
            GGUF_V2 | {"expert_used_count": 61},
            "expert_used_count must be at most 60, the experts of 3 groups, got 61",
        ),
    ],
)
def test_groups_that_are_refused(reader: ReadExperts, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(reader, keys)


@pytest.mark.parametrize(
    ("reader", "keys", "message"),
    [
        (deepseek_v3_experts, {"topk_method": "greedy"}, "topk_method must be 'noaux_tc', got 'greedy'"),
        (deepseek_v3_experts, {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' or 'noaux_tc', got 'soft"),
        (deepseek_v3_experts, {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        (
            deepseek_v2_experts,
            V2_KEYS | {"topk_method": "noaux_tc"},
            "topk_method must be 'greedy' or 'group_limited_greedy', got 'noaux_tc'",
        ),
        (deepseek_v2_experts, V2_KEYS | {"scoring_func": "sigmoid"}, "scoring_func must be 'softmax', got 'sigmoid'"),
        (deepseek_v2_experts, V2_KEYS | {"norm_topk_prob": True}, "norm_topk_prob must be false, got True"),
        (deepseek_v2_experts, {}, "num_experts_per_tok must be an integer"),
        (dots_experts, {"num_experts_per_tok": 6}, "n_routed_experts must be an integer"),
        (dots_experts, {"n_routed_experts": 128, "num_experts_per_tok": 6}, "n_shared_experts must be an integer"),
        (deepseek_gguf_experts, GGUF_V2 | {"expert_gating_func": 3}, "expert_gating_func must be 1 or 2, got 3"),
        (glm_gguf_experts, GGUF_V3 | {"expert_gating_func": 1}, "expert_gating_func must be 2, got 1"),
    ],
)
def test_other_routers_are_refused(reader: ReadExperts, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(reader, keys)


def test_a_model_may_have_dense_layers_only() -> None:
    assert read(deepseek_v3_experts, {"first_k_dense_replace": 61}) is None
    assert read(deepseek_gguf_experts, {"leading_dense_block_count": 61}) is None


def test_without_corrections_a_group_may_have_one_expert() -> None:
    experts = read(deepseek_v2_experts, V2_KEYS | {"n_group": 160, "topk_group": 10})
    assert experts is not None and experts.num_groups == 160
