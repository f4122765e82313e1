from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from radix_makers import check, i32, make, put


def test_a_repeated_prompt_finds_its_slots() -> None:
    cache, allocator = make()
    slots = put(cache, allocator, range(10))
    match = cache.match(i32(range(9)))
    np.testing.assert_array_equal(match.slots, slots[:9])
    assert match.slots.dtype == np.int32
    check(cache, allocator)


@pytest.mark.parametrize(("page_size", "shared"), [(1, 7), (2, 6), (4, 4), (8, 0)])
def test_prompts_share_the_common_prefix_aligned_down_to_the_page(page_size: int, shared: int) -> None:
    cache, allocator = make(page_size)
    first = put(cache, allocator, [*range(7), 100, 101, 102, 103, 104, 105])
    other = i32([*range(7), 200, 201, 202, 203, 204, 205])
    assert cache.match_len(other) == shared
    np.testing.assert_array_equal(cache.match(other).slots, first[:shared])
    assert cache.insert(other, first)[:2] == (shared, 13 // page_size * page_size)
    assert cache.match_len(other) == 13 // page_size * page_size


def test_insert_keeps_its_own_slots_for_what_it_has() -> None:
    cache, allocator = make()
    first = put(cache, allocator, [1, 2, 3, 4])
    mine = allocator.alloc_extend(i32([0]), i32([6]), i32([0]))
    assert mine is not None
    assert cache.insert(i32([1, 2, 3, 9, 8, 7]), mine)[:2] == (3, 6)
    np.testing.assert_array_equal(cache.match(i32([1, 2, 3, 9, 8, 7])).slots, np.concatenate((first[:3], mine[3:])))
    np.testing.assert_array_equal(cache.match(i32([1, 2, 3, 4])).slots, first)
    allocator.free(mine[:3])
    check(cache, allocator)
    assert cache.insert(i32([1, 2]), first[:2])[:2] == (2, 2)


def test_a_ragged_last_page_stays_with_the_caller() -> None:
    cache, allocator = make(page_size=4)
    slots = allocator.alloc_extend(i32([0]), i32([7]), i32([0]))
    assert slots is not None
    assert cache.insert(i32(range(7)), slots)[:2] == (0, 4)
    allocator.audit(np.concatenate((cache.audit(), slots[4:])))
    assert cache.insert(i32(range(3)), slots[:3])[:2] == (0, 0)


def test_what_is_inserted_is_copied() -> None:
    cache, _ = make()
    tokens, slots = i32([1, 2, 3]), i32([5, 6, 7])
    cache.insert(tokens, slots)
    tokens[:] = 0
    slots[:] = 0
    np.testing.assert_array_equal(cache.match(i32([1, 2, 3])).slots, [5, 6, 7])


def test_equal_tokens_in_two_namespaces_never_share() -> None:
    cache, allocator = make()
    names = ["", "a", "b", "\ud800"]  # a lone surrogate is a str too
    slots = [put(cache, allocator, range(8), name) for name in names]
    assert len(np.unique(np.concatenate(slots))) == 32
    for name, mine in zip(names, slots, strict=True):
        np.testing.assert_array_equal(cache.match(i32(range(8)), name).slots, mine)
    assert cache.match_len(i32(range(8)), "c") == 0
    check(cache, allocator)


def test_looking_for_unknown_namespaces_leaves_nothing_behind() -> None:
    cache, allocator = make()
    for i in range(100):
        node = cache.match(i32([1, 2]), f"user {i}").node
        cache.lock(node)
        put(cache, allocator, [1, 2, 3], f"user {i}")
        assert cache.evict(3) == 3
        cache.unlock(node)
    assert cache.num_nodes == 0 and not cache._root.children
    check(cache, allocator)


def test_the_empty_match_can_be_locked_and_locks_nothing() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    empty = cache.match(i32([9]))
    assert len(empty.slots) == 0
    cache.lock(empty.node)
    assert (cache.evictable_size, cache.protected_size) == (3, 0)
    assert cache.evict(3) == 3
    cache.unlock(empty.node)
    check(cache, allocator)


def test_a_lock_holds_its_prefix_and_nothing_else() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3, 4, 5, 6])
    put(cache, allocator, [1, 2, 9, 9])
    node = cache.match(i32([1, 2, 3, 4])).node
    cache.lock(node)
    cache.lock(node, is_use=False)
    assert (cache.evictable_size, cache.protected_size) == (4, 4)
    assert cache.evict(100) == 4
    assert cache.match_len(i32([1, 2, 3, 4, 5])) == 4
    cache.unlock(node)
    assert cache.evict(100) == 0
    cache.unlock(node)
    assert (cache.evictable_size, cache.protected_size) == (4, 0)
    check(cache, allocator)
    assert cache.evict(100) == 4


def test_a_locked_node_that_is_split_keeps_all_it_locked() -> None:
    cache, allocator = make()
    put(cache, allocator, range(10))
    node = cache.match(i32(range(10))).node
    cache.lock(node)
    put(cache, allocator, [0, 1, 2, 99])
    assert cache.match_len(i32([0, 1, 2, 3, 4])) == 5
    cache.match(i32([0, 1, 2, 3, 4]))
    assert (cache.evictable_size, cache.protected_size) == (1, 10)
    assert cache.evict(100) == 1
    cache.unlock(node)
    assert (cache.evictable_size, cache.protected_size) == (10, 0)
    check(cache, allocator)


def test_moving_a_lock_equals_lock_and_unlock_but_counts_no_new_use() -> None:
    cache, allocator = make(policy="lfu")
    put(cache, allocator, range(4))
    held = cache.match(i32(range(4))).node
    cache.lock(held)
    for end in (8, 12, 16):  # three more chunks
        put(cache, allocator, range(end))
        node = cache.match(i32(range(end))).node
        cache.move_lock(held, node)
        held = node
    assert cache.protected_size == 16
    put(cache, allocator, [50, 51])
    for _ in range(2):
        other = cache.match(i32([50, 51])).node
        cache.lock(other)
        cache.unlock(other)
    cache.unlock(held)
    assert (cache.evictable_size, cache.protected_size) == (18, 0)
    # The long prompt was used once, so it is the first to go, down to its first chunk.
    assert cache.evict(16) == 16
    assert cache.match_len(i32([50, 51])) == 2
    check(cache, allocator)


def test_a_lock_moves_only_down_its_own_path() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2])
    put(cache, allocator, [3, 4])
    held = cache.match(i32([1, 2])).node
    cache.lock(held)
    with pytest.raises(AssertionError, match="not on the way"):
        cache.move_lock(held, cache.match(i32([3, 4])).node)


def test_misuse_of_handles_is_caught() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2])
    node = cache.match(i32([1, 2])).node
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(node)
    cache.evict(2)
    with pytest.raises(AssertionError, match="evicted, discarded or reset"):
        cache.lock(node)


def test_match_len_is_match_without_its_effects() -> None:
    cache, allocator = make(policy="lru")
    put(cache, allocator, [1, 1, 1, 1])
    put(cache, allocator, [2, 2, 2, 2])
    assert cache.match_len(i32([1, 1, 1])) == 3
    assert cache.num_nodes == 2
    cache.evict(4)
    assert cache.match_len(i32([1, 1, 1])) == 0
    assert cache.match_len(i32([2, 2])) == 2


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_discarded_prefix_goes_with_all_that_hangs_below_it(page_size: int) -> None:
    cache, allocator = make(page_size)
    put(cache, allocator, [1] * 8 + [2] * 8)
    put(cache, allocator, [1] * 8 + [2] * 4 + [3] * 4)
    put(cache, allocator, [1] * 8 + [4] * 8)
    cache.discard(i32([1] * 8 + [2] * 8), 8)
    assert cache.match_len(i32([1] * 8 + [2] * 8)) == 8
    assert cache.match_len(i32([1] * 8 + [4] * 8)) == 16
    check(cache, allocator)
    cache.discard(i32([1] * 8), 8)
    cache.discard(i32([9] * 8), 0)
    cache.discard(i32([1] * 8), 0, "another namespace")
    assert cache.evictable_size == 16
    cache.discard(i32([1] * 8 + [4] * 8), 0)
    assert cache.evictable_size == 0 and not cache._root.children
    check(cache, allocator)


@pytest.mark.parametrize("kept_len", [0, 2])
def test_what_is_locked_is_discarded_at_once_and_freed_with_its_last_lock(kept_len: int) -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3, 4, 5, 6])
    first, second = cache.match(i32([1, 2, 3])).node, cache.match(i32([1, 2, 3, 4])).node
    for node in (first, second, second):
        cache.lock(node)
    cache.discard(i32([1, 2, 3, 4]), kept_len)
    assert cache.match_len(i32([1, 2, 3, 4, 5])) == kept_len
    assert (cache.evictable_size, cache.protected_size) == (0, 4)
    assert cache.is_discarded(first) and cache.is_discarded(second)
    again = put(cache, allocator, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(cache.match(i32([1, 2, 3, 4])).slots[kept_len:], again[kept_len:4])
    held = cache.audit()
    allocator.audit(held)
    assert len(held) == 6 + 4 - kept_len
    cache.unlock(second)
    assert cache.evict(100) == 6 - kept_len
    cache.unlock(second)
    assert cache.protected_size == 3
    cache.unlock(first)
    assert (cache.evictable_size, cache.protected_size) == (kept_len, 0)
    check(cache, allocator)
    assert cache.evict(100) == kept_len
    assert not cache._root.children


def test_reset_forgets_everything() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    cache.lock(cache.match(i32([1, 2])).node)
    cache.reset()
    allocator.clear()
    assert (cache.evictable_size, cache.protected_size, cache.num_nodes) == (0, 0, 0)
    assert cache.match_len(i32([1, 2, 3])) == 0
    check(cache, allocator)


def test_deep_trees_need_no_stack() -> None:
    depth = 5000  # five times Python's limit
    cache, allocator = make(size=depth)
    put(cache, allocator, range(depth))
    for end in range(depth - 1, 0, -1):
        cache.match(np.arange(end, dtype=np.int32))
    assert cache.num_nodes == depth
    match = cache.match(np.arange(depth, dtype=np.int32))
    cache.lock(match.node)
    assert cache.protected_size == depth
    cache.unlock(match.node)
    check(cache, allocator)
    assert cache.evict(depth // 2) == depth // 2
    check(cache, allocator)
    root = weakref.ref(cache)
    del cache, match
    gc.collect()
    assert root() is None


def test_the_audit_finds_what_is_wrong() -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    cache.evictable_size += 1
    with pytest.raises(AssertionError, match="evictable: 3 in the tree, 4 on record"):
        cache.audit()
    cache.evictable_size -= 1
    cache.insert(i32([7, 8]), i32([1, 2]))  # slots that the cache holds already
    with pytest.raises(AssertionError, match="owned twice"):
        allocator.audit(cache.audit())
