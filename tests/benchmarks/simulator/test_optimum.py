"""The optimum of a prefix cache, against trying everything."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.benchmarks.simulator.optimum import PrefixTrace

Tokens = tuple[int, ...]


def brute_force(prompts: list[Tokens], capacity: int, page_size: int) -> int:
    """The most hits over all ways to choose, after each prompt, what to keep of what is there."""

    def blocks(tokens: Tokens) -> list[Tokens]:
        """A block is named by all tokens up to its end."""
        return [tokens[:end] for end in range(page_size, len(tokens) + 1, page_size)]

    best: dict[frozenset[Tokens], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[Tokens], int] = {}
        wanted = blocks(prompt[:-1])
        for kept, hits in best.items():
            found = hits
            for block in wanted:
                if block not in kept:
                    break
                found += page_size
            there = sorted(kept | set(blocks(prompt)))
            for count in range(min(len(there), capacity // page_size) + 1):
                for chosen in combinations(there, count):
                    state = frozenset(chosen)
                    after[state] = max(after.get(state, 0), found)
        best = after
    return max(best.values())


def best_hits(prompts: list[Tokens], capacity: int, page_size: int) -> int:
    trace = PrefixTrace(page_size)
    for prompt in prompts:
        trace.look_up(np.array(prompt, np.int32))
    found = trace.best_hits(capacity)
    assert trace.best_hits(capacity) == found, "a second run differs"
    return found


prompts = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5)


@given(prompts, st.integers(1, 4), st.sampled_from([1, 2]))
def test_it_is_the_best_that_any_choice_can_reach(given: list[Tokens], capacity: int, page_size: int) -> None:
    assert best_hits(given, capacity, page_size) == brute_force(given, capacity, page_size)


def test_it_keeps_what_comes_back_first() -> None:
    a, b, c = (1, 1, 9), (2, 2, 9), (3, 3, 9)
    assert best_hits([a, b, c, a, b], capacity=4, page_size=1) == 4
    assert best_hits([a, b, c, a, b], capacity=2, page_size=1) == 2
    assert best_hits([a, b, c, a, b], capacity=3, page_size=1) == 3, "a part of a segment can stay"


def test_an_answer_can_be_found_by_the_next_turn() -> None:
    trace = PrefixTrace(page_size=1)
    trace.look_up(np.array([1, 2], np.int32))
    trace.insert(np.array([1, 2, 3, 4], np.int32))
    trace.look_up(np.array([1, 2, 3, 4, 5], np.int32))
    assert trace.best_hits(100) == 4
    assert trace.num_prompt_tokens == 7


def test_namespaces_share_nothing() -> None:
    trace = PrefixTrace(page_size=1)
    for namespace in ("", "a", ""):
        trace.look_up(np.array([1, 2, 3], np.int32), namespace)
    assert trace.best_hits(100) == 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_large_cache_finds_all_that_was_ever_there(page_size: int) -> None:
    rng = np.random.default_rng(0)
    shared = rng.integers(1, 99, 64)
    trace = PrefixTrace(page_size)
    for _ in range(50):
        trace.look_up(np.concatenate([shared, rng.integers(1, 99, 17)]).astype(np.int32))
    assert trace.best_hits(1 << 30) >= 49 * 64
