"""The hottest edges of the radix cache's tree."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import pytest

from tercet.mem_cache import radix_heat
from tercet.mem_cache.allocator import make_allocator
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.radix_node import RadixNode


def make_cache(page_size: int = 1) -> RadixCache:
    return RadixCache(make_allocator(1024, page_size), page_size, "lru")


def use(cache: RadixCache, tokens: list[int], namespace: str = "") -> object:
    """Inserts a prompt and locks it, as a request does. Returns the handle."""
    array = np.array(tokens, dtype=np.int32)
    matched = cache.match_len(array, namespace)
    slots = np.concatenate(
        [cache.match(array, namespace).slots, np.arange(1, len(tokens) - matched + 1, dtype=np.int32)]
    )
    cache.insert(array, slots.astype(np.int32), namespace)
    node = cache.match(array, namespace).node
    cache.lock(node)
    return node


def test_an_empty_cache_has_none() -> None:
    assert make_cache().hottest(4, 4) == []


def test_what_was_used_once_is_not_hot() -> None:
    cache = make_cache()
    use(cache, [1, 2, 3])
    assert cache.hottest(4, 4) == []


def test_a_lock_that_moves_to_a_longer_prefix_uses_what_is_new_there() -> None:
    """A request shares its prompt while it runs. Each node on its path counts it once."""
    cache = make_cache()
    for _ in range(2):
        held = use(cache, [1, 2])
        longer = np.array([1, 2, 3], dtype=np.int32)
        node = cache.insert(longer, longer, "").node
        cache.move_lock(held, node)
        cache.unlock(node)
    assert [edge.num_uses for edge in cache.hottest(4, 4)] == [2, 2]


def test_edges_are_listed_as_a_tree() -> None:
    cache = make_cache()
    prefix = list(range(10))
    for last in range(3):
        node = use(cache, [*prefix, 50, 60 + last])
        cache.unlock(node)
    held = use(cache, [*prefix, 70])
    first, second = cache.hottest(4, 4)
    assert (first.depth, first.start, first.num_tokens, first.num_uses) == (0, 0, 10, 4)
    assert first.token_ids == [0, 1, 2, 3] and first.is_locked
    assert (second.depth, second.start, second.token_ids, second.num_uses) == (1, 10, [50], 3)
    assert not second.is_locked
    cache.unlock(held)
    assert not cache.hottest(1, 4)[0].is_locked


def test_the_edges_that_saved_most_are_chosen() -> None:
    cache = make_cache()
    for tokens, uses in (([1] * 3, 5), ([2] * 100, 2), ([3] * 50, 3), ([4] * 4, 2)):
        for _ in range(uses):
            cache.unlock(use(cache, tokens))
    heat = {edge.token_ids[0]: edge.num_tokens * (edge.num_uses - 1) for edge in cache.hottest(2, 1)}
    assert heat == {2: 100, 3: 100}


def test_other_namespaces_are_not_shown() -> None:
    cache = make_cache()
    for _ in range(3):
        use(cache, [1, 2, 3], "tenant")
    assert cache.hottest(4, 4) == []


def test_a_large_tree_is_searched_from_its_hottest_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix_heat, "MAX_VISITED", 2)
    cache = make_cache()
    for tokens, uses in (([1] * 3, 2), ([2] * 3, 9), ([3] * 3, 5)):
        for _ in range(uses):
            use(cache, tokens)
    assert sorted(edge.token_ids[0] for edge in cache.hottest(9, 1)) == [2, 3]


def test_nothing_below_an_edge_that_was_used_once_is_visited() -> None:
    class Unseen(dict[bytes, RadixNode]):
        def values(self) -> NoReturn:
            raise AssertionError("a cold edge was visited")

    cache = make_cache()
    for _ in range(2):
        use(cache, [1, 2])
    for last in (3, 4):
        use(cache, [1, 2, last, 5])
    for first in (2, 3, 4):
        cold = use(cache, [first, 6])
        assert isinstance(cold, RadixNode)
        cold.children = Unseen()
    assert [edge.token_ids for edge in cache.hottest(9, 9)] == [[1, 2]]
