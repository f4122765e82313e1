"""Look-ups that are kept while the tree changes: they tell when their length may have changed, and only then."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_makers import i32, make, put

from tercet.mem_cache import radix_lookup
from tercet.mem_cache.radix_lookup import RadixLookup
from tercet.srt.arrays import Int32Array

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
ACTS = st.one_of(
    st.tuples(st.just("put"), PROMPTS, st.sampled_from(["", "x"])),
    st.tuples(st.just("evict"), st.integers(1, 12), st.just("")),
    st.tuples(st.just("discard"), PROMPTS, st.sampled_from(["", "x"])),
    st.tuples(st.just("lock"), PROMPTS, st.sampled_from(["", "x"])),
    st.tuples(st.just("unlock"), st.just(0), st.just("")),
    st.tuples(st.just("reset"), st.just(0), st.just("")),
)


@given(st.sampled_from([1, 2]), st.lists(ACTS, max_size=25), st.lists(PROMPTS, min_size=1, max_size=6))
@settings(deadline=None)
def test_a_current_look_up_has_the_right_length(page: int, acts: list[tuple[str, Any, str]], asked: list[Any]) -> None:
    cache, allocator = make(page)
    kept: dict[tuple[int, str], Any] = {}
    locked: list[Any] = []
    for act, what, namespace in acts:
        if act == "put":
            put(cache, allocator, what, namespace)
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
        for index, tokens in enumerate(asked):
            for name in ("", "x"):
                length = cache.match(i32(tokens), name).slots.size if act == "lock" else None
                before = kept.get((index, name))
                found = cache.look_up(i32(tokens), name)
                assert length is None or found.length == length
                assert found.is_current()
                again = cache.look_up(i32(tokens), name, before)
                assert again.length == found.length and again.is_current()
                assert before is None or not before.is_current() or before.length == found.length
                kept[index, name] = before if before is not None and before.is_current() else found


def test_a_prefix_that_has_grown_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks adds a node in each step, and many requests may wait for it."""
    compared: list[int] = []
    common_len = radix_lookup.common_len

    def counted(a: Int32Array, b: Int32Array) -> int:
        compared.append(len(b))
        return common_len(a, b)

    cache, allocator = make()
    prompt, found = list(range(60)), None
    for end in range(10, 60, 10):
        put(cache, allocator, prompt[:end])
        with monkeypatch.context() as patch:
            patch.setattr(radix_lookup, "common_len", counted)
            found = cache.look_up(i32(prompt), "", found)
        assert found.length == end and found.is_current()
    assert compared == [60, 50, 40, 30, 20]


@pytest.mark.parametrize(("prompt", "length"), [([9, 9], 0), ([1, 2, 3, 9], 3), ([1, 2, 9], 2), ([1, 2, 3], 3)])
def test_a_look_up_stays_current_while_other_prefixes_come_and_go(prompt: list[int], length: int) -> None:
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    found = cache.look_up(i32(prompt))
    assert isinstance(found, RadixLookup) and found.length == length
    cache.lock(cache.match(i32([1, 2, 3])).node)
    for number in range(20):
        put(cache, allocator, [4, number, 5])
        put(cache, allocator, [number, 7], "x")
        cache.evict(2)
        assert found.is_current()
    put(cache, allocator, prompt)
    assert found.is_current() == (length == len(prompt))


def test_a_look_up_of_a_discarded_prefix_is_not_current() -> None:
    """A lock keeps the node as it was, though it has left the tree."""
    cache, allocator = make()
    put(cache, allocator, [1, 2, 3])
    put(cache, allocator, [5])  # so the tree is not empty
    cache.lock(cache.match(i32([1, 2, 3])).node)
    found = cache.look_up(i32([1, 2, 3, 4]))
    assert found.length == 3 and found.is_current()
    cache.discard(i32([1, 2, 3]), 0)
    assert not found.is_current() and cache.look_up(i32([1, 2, 3, 4]), "", found).length == 0


def test_a_look_up_in_a_namespace_that_was_empty_meanwhile_is_not_current() -> None:
    """The namespace has another node now."""
    cache, allocator = make()
    put(cache, allocator, [1, 2], "x")
    found = cache.look_up(i32([3, 4]), "x")
    assert found.length == 0 and found.is_current()
    cache.evict(2)
    put(cache, allocator, [3, 4], "x")
    assert not found.is_current()
