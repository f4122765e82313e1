"""The prefix cache of models with recurrent layers: it finds a prefix only where a state was saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_makers import check, i32

from tercet.mem_cache.allocator import BaseAllocator, make_allocator
from tercet.mem_cache.base_prefix_cache import CacheNode, RetentionOwner
from tercet.mem_cache.evict_policy import EVICT_POLICIES
from tercet.mem_cache.radix_lookup import namespace_key
from tercet.mem_cache.recurrent_cache import RecurrentCache

FIRST = 5


def make(num_states: int = 4, page_size: int = 1, policy: str = "lru") -> tuple[RecurrentCache, BaseAllocator]:
    allocator = make_allocator(256, page_size)
    return RecurrentCache(allocator, page_size, policy, range(FIRST, FIRST + num_states)), allocator


def put(
    cache: RecurrentCache, allocator: BaseAllocator, tokens: object, namespace: str = "", *, state: bool = True
) -> CacheNode:
    """Insert tokens, with the state after them. Returns the node at their end."""
    tokens = i32(tokens)
    slots = allocator.alloc_extend(i32([0]), i32([len(tokens)]), i32([0]))
    assert slots is not None
    row = cache.take_row() if state else None
    duplicate_len, taken_len, node = cache.insert(tokens, slots, namespace)
    allocator.free(slots[:duplicate_len])
    allocator.free(slots[taken_len:])
    if row is not None and taken_len == len(tokens):
        cache.keep_state(node, row)
    elif row is not None:
        cache.free_row(row)
    return node


def saved_prefixes(cache: RecurrentCache, namespace: str) -> list[tuple[int, ...]]:
    """The prefixes of a namespace that end at a node with a state."""
    found = []
    stack = [(cache._root.children.get(namespace_key(namespace)), ())]
    while stack:
        node, before = stack.pop()
        if node is not None:
            prefix = (*before, *node.tokens.tolist())
            stack += [(child, prefix) for child in node.children.values()]
            if node in cache._row_of:
                found.append(prefix)
    return found


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
NAMESPACES = st.sampled_from(["", "x"])
ACTS = st.one_of(
    st.tuples(st.sampled_from(["put", "put", "put without", "take"]), PROMPTS, NAMESPACES),
    st.tuples(st.just("evict"), st.integers(1, 12), st.just("")),
    st.tuples(st.just("discard"), PROMPTS, NAMESPACES),
    st.tuples(st.just("lock"), PROMPTS, NAMESPACES),
    st.tuples(st.just("unlock"), st.just(0), st.just("")),
    st.tuples(st.just("reset"), st.just(0), st.just("")),
)


@given(
    st.sampled_from([1, 2]),
    st.integers(1, 5),
    st.sampled_from(sorted(EVICT_POLICIES)),
    st.lists(ACTS, max_size=25),
    st.lists(PROMPTS, min_size=1, max_size=5),
)
@settings(deadline=None)
def test_all_look_ups_find_the_longest_prefix_with_a_state(
    page: int, num_states: int, policy: str, acts: list[tuple[str, Any, str]], asked: list[Any]
) -> None:
    cache, allocator = make(num_states, page, policy)
    kept: dict[tuple[int, str], Any] = {}
    locked: list[Any] = []
    for act, what, namespace in acts:
        if act in ("put", "put without"):
            put(cache, allocator, what, namespace, state=act == "put")
        elif act == "take":
            left = cache.num_rows_left
            row = cache.take_row()
            assert (row is not None) == (left > 0)
            if row is not None:
                cache.free_row(row)
        elif act == "evict":
            cache.evict(what)
        elif act == "discard":
            cache.discard(i32(what), len(what) // 2 // page * page, namespace)
        elif act == "lock":
            locked.append(cache.match(i32(what), namespace).node)
            cache.lock(locked[-1])
        elif act == "unlock" and locked:
            cache.unlock(locked.pop())
        elif act == "reset" and not locked:
            cache.reset()
            allocator.clear()
        check(cache, allocator)
        assert cache.num_taken_rows == 0
        for name in ("", "x"):
            prefixes = saved_prefixes(cache, name)
            for index, tokens in enumerate(asked):
                fits = [len(prefix) for prefix in prefixes if prefix == tuple(tokens[: len(prefix)])]
                expected = max(fits, default=0)
                before = kept.get((index, name))
                assert before is None or not before.is_current() or before.length == expected
                found = cache.look_up(i32(tokens), name, before)
                assert found.length == expected and found.is_current()
                path, length = cache.match_path(i32(tokens), name)
                assert length == expected == sum(len(node.tokens) for node in path)
                assert cache.evictable_match_len(i32(tokens), name) == sum(
                    len(node.tokens) for node in path if not node.lock_count
                )
                kept[index, name] = before if before is not None and before.is_current() else found
                if act == "lock":
                    match = cache.match(i32(tokens), name)
                    assert len(match.slots) == expected
                    if expected:
                        cache.use_state(match.node)
                assert cache.kv_match_len(i32(tokens), name) >= expected


def test_the_least_recently_used_state_is_dropped() -> None:
    cache, allocator = make(2)
    put(cache, allocator, [1, 2])
    put(cache, allocator, [3, 4])
    for tokens in ([3, 4], [1, 2]):
        cache.use_state(cache.match(i32(tokens)).node)
    put(cache, allocator, [5, 6])
    assert [cache.match_len(i32(tokens)) for tokens in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]


def test_states_of_retained_prefixes_are_dropped_last() -> None:
    cache, allocator = make(2, policy="value")
    put(cache, allocator, [1, 2])
    cache.retain(i32([1, 2]), 60.0, RetentionOwner())
    for tokens in ([3, 4], [5, 6]):
        put(cache, allocator, tokens)
    assert [cache.match_len(i32(tokens)) for tokens in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    cache.retain(i32([5, 6]), 60.0, RetentionOwner())
    put(cache, allocator, [7, 8])
    assert [cache.match_len(i32(tokens)) for tokens in ([1, 2], [5, 6], [7, 8])] == [0, 2, 2]


def test_kv_that_no_request_can_use_is_evicted_first() -> None:
    cache, allocator = make(2)
    put(cache, allocator, [1, 2])
    put(cache, allocator, [3, 4])
    put(cache, allocator, [5, 6, 7])
    assert cache.match_len(i32([1, 2])) == 0 and cache.kv_match_len(i32([1, 2])) == 2
    cache.match(i32([3, 4]))
    assert cache.evict(2) == 2
    assert [cache.kv_match_len(i32(tokens)) for tokens in ([1, 2], [3, 4], [5, 6, 7])] == [0, 2, 3]


def test_a_shortened_prefix_has_no_state() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    cache.evict(1)
    assert cache.kv_match_len(i32([1, 2, 3])) == 2 and cache.match_len(i32([1, 2, 3])) == 0
    assert cache.num_states == 0 and cache.num_taken_rows == 0


def test_a_node_keeps_its_first_state() -> None:
    cache, allocator = make()
    node = put(cache, allocator, [1, 2])
    row = cache.take_row()
    assert row is not None and not cache.keep_state(node, row)
    assert cache.use_state(node) == FIRST and cache.num_states == 1 and cache.num_taken_rows == 0
    cache.drop_state(node, FIRST + 1)
    assert cache.num_states == 1, "another state"
    for _ in range(2):
        cache.drop_state(node, FIRST)
    assert cache.num_states == cache.num_taken_rows == 0


def test_prompts_that_are_sent_once_do_not_displace_a_used_state() -> None:
    cache, allocator = make(4)
    system = [[7], [8], [9]]
    for tokens in system:
        put(cache, allocator, tokens)
        cache.use_state(cache.match(i32(tokens)).node)
        for other in range(10, 20):
            put(cache, allocator, [other, tokens[0]])
    assert [cache.match_len(i32(tokens)) for tokens in system] == [0, 1, 1], "used ones keep half of the rows"
    assert cache.match_len(i32([19, 9])) == 2


def test_no_row_is_left_if_requests_have_taken_all() -> None:
    cache, _ = make(2)
    assert [cache.take_row() for _ in range(3)] == [FIRST, FIRST + 1, None]
    assert cache.num_taken_rows == 2 and cache.num_rows_left == 0


def test_slots_of_tokens_without_a_state() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3, 4])
    put(cache, allocator, [1, 2, 9])
    assert cache.match_len(i32([1, 2])) == 0
    assert np.array_equal(cache.cached_slots(i32([1, 2])), cache.match(i32([1, 2, 3, 4])).slots[:2])


@pytest.mark.parametrize("damage", ["two owners", "unknown row", "no tree"])
def test_the_audit_finds_wrong_states(damage: str) -> None:
    cache, allocator = make()
    node = put(cache, allocator, [1, 2])
    if damage == "two owners":
        cache._free_rows.append(FIRST)
    elif damage == "unknown row":
        cache._row_of[node] = 99
    else:
        cache._row_of[type(node)(None, b"", i32([]), i32([]), 0)] = cache._free_rows.pop()
    with pytest.raises(AssertionError, match="saved state"):
        cache.audit()
