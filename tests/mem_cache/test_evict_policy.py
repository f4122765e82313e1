from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tercet.mem_cache.evict_policy import EVICT_POLICIES, MAX_EXTRA_COST, Value, equal_cost_depth, get_evict_policy
from tercet.srt.model_files.experts_config import ExpertsConfig, SharedExpert
from tercet.srt.model_files.latent_config import LatentConfig
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.short_convolutions import ShortConvolutions

DENSE = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=8,
    intermediate_size=12,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=9,
    context_len=9,
)


@dataclass
class Leaf:
    name: str
    created: int
    last_access: int
    num_uses: int
    end: int = 0
    lead: int = 0
    retained_until_s: float = 0.0


LEAVES = [
    Leaf("old, just used", created=1, last_access=9, num_uses=3),
    Leaf("middle, used most", created=2, last_access=5, num_uses=7),
    Leaf("middle, used least", created=3, last_access=7, num_uses=1),
    Leaf("new, long not used", created=4, last_access=4, num_uses=3),
]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("value", [3, 1, 2, 0]),
        ("lru", [3, 1, 2, 0]),
        ("lfu", [2, 3, 0, 1]),  # 3 and 0 were used as often: the longer unused goes first
        ("fifo", [0, 1, 2, 3]),
        ("mru", [0, 2, 1, 3]),
        ("filo", [3, 2, 1, 0]),
    ],
)
def test_order_of_going(policy: str, order: list[int]) -> None:
    goes = sorted(LEAVES, key=get_evict_policy(policy))
    assert [leaf.name for leaf in goes] == [LEAVES[i].name for i in order]


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="unknown eviction policy 'random'; allowed: value, lru, lfu, fifo, mru, filo"):
        get_evict_policy("random")


def test_all_known_policies_are_tried_here() -> None:
    assert sorted(EVICT_POLICIES) == sorted(["value", "lru", "lfu", "fifo", "mru", "filo"])


def test_the_value_of_a_leaf_is_its_retention_its_last_use_and_the_cost_of_its_last_token() -> None:
    value = Value(equal_cost_depth=1000.0)
    leaf = Leaf("", created=1, last_access=70, num_uses=2, end=100, lead=20)
    assert value(leaf) == (0.0, 70 + 0.1 * 20, 70)
    leaf.end = 100_000
    assert value(leaf) == (0.0, 70 + MAX_EXTRA_COST * 20, 70)
    leaf.num_uses = 1
    assert value(leaf) == (0.0, 70, 70)
    leaf.retained_until_s = 40.0
    assert value(leaf) == (40.0, 70, 70)


def test_only_the_experts_of_a_token_count_in_the_cost_of_its_weights() -> None:
    dense = replace(DENSE, architecture="Qwen3MoeForCausalLM")
    experts = ExpertsConfig(num_experts=99, num_experts_per_token=2, intermediate_size=6, normalized=True)
    assert equal_cost_depth(dense) == (8 * 24 + 3 * 8 * 12) / 16
    assert equal_cost_depth(replace(dense, experts=experts)) == equal_cost_depth(dense)
    mixed = replace(dense, intermediate_size=100, experts=replace(experts, dense_layers=(0,)))
    assert equal_cost_depth(mixed) == (8 * 24 + 3 * 8 * (100 + 3 * 12) / 4) / 16
    shared = replace(mixed, experts=replace(mixed.experts, shared=SharedExpert(5, has_gate=True)))
    assert equal_cost_depth(shared) == (8 * 24 + 3 * 8 * (100 + 3 * (12 + 5)) / 4) / 16


def test_layers_without_attention_add_weights_only() -> None:
    convolutions = ShortConvolutions((0, 1, 3), channels=8, width=3)
    config = replace(DENSE, architecture="Lfm2ForCausalLM", convolutions=convolutions)
    of_convolutions = 3 * (8 * 3 * 8 + 8 * 8)
    assert equal_cost_depth(config) == (8 * 24 + of_convolutions + 4 * 3 * 8 * 12) / 16


@pytest.mark.parametrize(("query_rank", "of_queries"), [(None, 8 * 2 * 7), (3, 3 * (8 + 2 * 7))])
def test_latent_attention_costs_what_its_own_products_do(query_rank: int | None, of_queries: int) -> None:
    latent = LatentConfig(latent_dim=10, nope_dim=5, rope_dim=2, value_dim=6, query_rank=query_rank)
    config = ModelConfig(
        architecture="YoutuForCausalLM",
        hidden_size=8,
        intermediate_size=20,
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=12,
        latent=latent,
        vocab_size=9,
        context_len=9,
    )
    projections = of_queries + 8 * 12 + 2 * 10 * (5 + 6) + 2 * 6 * 8
    assert equal_cost_depth(config) == (projections + 3 * 8 * 20) / (2 * (12 + 10))
