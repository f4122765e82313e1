"""Which leaves the radix cache evicts, and how many others it looks at."""

from __future__ import annotations

import numpy as np
import pytest
from radix_makers import check, i32, make, put

from tercet.mem_cache.evict_policy import EVICT_POLICIES, LeafHistory, lru
from tercet.mem_cache.radix_node import shortened


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("value", [2, 3, 0, 1]),
        ("lru", [2, 3, 0, 1]),
        ("lfu", [3, 0, 1, 2]),
        ("fifo", [0, 1, 2, 3]),
        ("mru", [1, 0, 3, 2]),
        ("filo", [3, 2, 1, 0]),
    ],
)
def test_leaves_go_in_the_order_of_the_policy(policy: str, order: list[int]) -> None:
    cache, allocator = make(policy=policy)
    prompts = [[i, i, i, i] for i in range(4)]
    for prompt in prompts:
        put(cache, allocator, prompt)
    # Used: 0 once, 1 twice, 2 three times, 3 never; looked at last: 0, then 1.
    for i, uses in [(2, 3), (1, 2), (0, 1)]:
        node = cache.match(i32(prompts[i])).node
        for _ in range(uses):
            cache.lock(node)
            cache.unlock(node)
    for i in (3, 0, 1):
        cache.match(i32(prompts[i]))
    gone = []
    for _ in prompts:
        assert cache.evict(4) == 4
        gone += [i for i, prompt in enumerate(prompts) if i not in gone and not cache.match_len(i32(prompt))]
    assert gone == order


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_leaf_is_shortened_from_its_end_not_lost(page_size: int) -> None:
    cache, allocator = make(page_size)
    slots = put(cache, allocator, range(64))
    assert cache.evict(6) == (6 if page_size == 1 else 8)
    left = cache.evictable_size
    np.testing.assert_array_equal(cache.match(i32(range(64))).slots, slots[:left])
    check(cache, allocator)
    assert put(cache, allocator, range(64)) is not None
    assert cache.match_len(i32(range(64))) == 64
    check(cache, allocator)


def test_a_shortened_array_does_not_keep_much_more_than_itself_alive() -> None:
    array = np.arange(1000, dtype=np.int32)
    for length in (900, 600, 500, 499, 300, 100, 3, 1):
        array = shortened(array, length)
        np.testing.assert_array_equal(array, np.arange(length))
        assert array.base is None or array.base.size <= 2 * length


def test_evicting_nothing_or_more_than_there_is() -> None:
    cache, allocator = make()
    assert cache.evict(5) == 0
    put(cache, allocator, [1, 2, 3])
    assert cache.evict(0) == 0
    assert cache.evict(-1) == 0
    assert cache.evict(1000) == 3
    assert (cache.evictable_size, allocator.num_free) == (0, 256)


def test_what_is_left_of_a_discarded_prefix_keeps_its_time_of_access() -> None:
    cache, allocator = make(policy="lru")
    put(cache, allocator, [1, 1, 1, 1])
    put(cache, allocator, [2, 2])
    cache.match(i32([1, 1, 1, 1]))
    cache.discard(i32([1, 1, 1, 1]), 2)
    assert cache.evict(2) == 2
    assert cache.match_len(i32([1, 1])) == 2 and cache.match_len(i32([2, 2])) == 0


def test_evicting_a_leaf_looks_at_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counting(leaf: LeafHistory) -> tuple[int, ...]:
        nonlocal looked
        looked += 1
        return lru(leaf)

    monkeypatch.setitem(EVICT_POLICIES, "counting", counting)
    cache, allocator = make(size=4096, policy="counting")
    for i in range(2000):
        put(cache, allocator, [i, i])
    looked = 0
    for _ in range(100):
        assert cache.evict(2) == 2
    assert looked <= 100


def test_looking_at_one_leaf_for_ever_does_not_grow_the_heap() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    for _ in range(2000):
        cache.match(i32([1, 2, 3]))
    assert len(cache._heap) < 200
    check(cache, allocator)


def test_a_discarded_tree_leaves_no_heap_that_is_too_long() -> None:
    cache, allocator = make()
    for i in range(200):
        put(cache, allocator, [7, i])
    cache.discard(i32([7]), 0)
    check(cache, allocator)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: value, lru"):
        make(policy="best")
