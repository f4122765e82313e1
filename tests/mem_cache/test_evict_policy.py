from __future__ import annotations

from dataclasses import dataclass

import pytest

from tercet.mem_cache.evict_policy import EVICT_POLICIES, get_evict_policy


@dataclass
class Leaf:
    name: str
    created: int
    last_access: int
    num_uses: int


LEAVES = [
    Leaf("old, just used", created=1, last_access=9, num_uses=3),
    Leaf("middle, used most", created=2, last_access=5, num_uses=7),
    Leaf("middle, used least", created=3, last_access=7, num_uses=1),
    Leaf("new, long not used", created=4, last_access=4, num_uses=3),
]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
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
    with pytest.raises(ValueError, match="unknown eviction policy 'random'; allowed: lru, lfu, fifo, mru, filo"):
        get_evict_policy("random")


def test_all_known_policies_are_tried_here() -> None:
    assert sorted(EVICT_POLICIES) == sorted(["lru", "lfu", "fifo", "mru", "filo"])
