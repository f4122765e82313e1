"""Retention in the radix cache, on a clock that stands until a test moves it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radix_makers import check, i32, put

from tercet.mem_cache.allocator import BaseAllocator, make_allocator
from tercet.mem_cache.base_prefix_cache import RetentionOwner
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.retention import MAX_RETENTIONS, Retentions

NOBODY = RetentionOwner()
COSTS_EQUAL = 1e12


class Rig:
    """A cache of 100 tokens in pages of 1, where every token costs the same. Half of it can be retained."""

    def __init__(self, policy: str = "value", equal_cost_depth: float = COSTS_EQUAL) -> None:
        self.now_s = 0.0
        self.allocator: BaseAllocator = make_allocator(100, 1)
        self.cache = RadixCache(self.allocator, 1, policy, equal_cost_depth=equal_cost_depth, clock=lambda: self.now_s)

    @property
    def retentions(self) -> Retentions:
        assert self.cache.retentions is not None
        return self.cache.retentions

    def put(self, first: int, length: int = 10, namespace: str = "") -> np.ndarray:
        """Caches a prompt of this length, which begins with `first`."""
        tokens = i32([first, *range(1000, 999 + length)])
        put(self.cache, self.allocator, tokens, namespace)
        return tokens

    def retain(self, tokens: np.ndarray, seconds: float, tenant: str = "", session: str = "", space: str = "") -> None:
        self.cache.retain(tokens, seconds, RetentionOwner(tenant, session), space)

    def lost(self, *prompts: np.ndarray) -> list[int]:
        """The order in which these prompts are evicted."""
        gone: list[int] = []
        while self.cache.evict(1):
            for prompt in prompts:
                if not self.cache.match_len(prompt[:1]) and prompt[0] not in gone:
                    gone.append(int(prompt[0]))
        check(self.cache, self.allocator)
        return gone


def test_a_retained_prefix_outlives_those_that_are_used_later() -> None:
    rig = Rig()
    old, middle = rig.put(1), rig.put(2)
    rig.retain(old, 30)
    rig.now_s = 20
    new = rig.put(3)
    assert rig.lost(old, middle, new) == [2, 3, 1]


@pytest.mark.parametrize(("later_s", "order"), [(29, [2, 3, 1]), (31, [2, 1, 3])])
def test_a_retention_lapses(later_s: float, order: list[int]) -> None:
    """Until then it goes after all that are not retained. Then it ages like all others."""
    rig = Rig()
    old, middle = rig.put(1), rig.put(2)
    rig.retain(old, 30)
    rig.now_s = later_s
    new = rig.put(3)
    assert rig.lost(old, middle, new) == order


def test_retention_lapses_while_nothing_is_evicted() -> None:
    rig = Rig()
    prompt = rig.put(1)
    rig.retain(prompt, 30)
    rig.now_s = 29
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (10, 1)
    rig.now_s = 30
    rig.cache.evict(1)
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (0, 0)


def test_what_would_lapse_first_is_evicted_first() -> None:
    rig = Rig()
    prompts = [rig.put(i) for i in (1, 2, 3)]
    for prompt, seconds in zip(prompts, (50, 10, 30), strict=True):
        rig.retain(prompt, seconds)
    assert rig.lost(*prompts) == [2, 3, 1]


def test_retention_is_no_pin() -> None:
    rig = Rig()
    rig.retain(rig.put(1, 50), 3600)
    assert rig.cache.evictable_size == 50
    assert rig.cache.evict(50) == 50
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (0, 0)
    check(rig.cache, rig.allocator)


def test_the_rest_of_a_shortened_prefix_stays_retained() -> None:
    rig = Rig()
    prompt = rig.put(1, 20)
    put(rig.cache, rig.allocator, [*prompt, 5, 6])  # the prompt and its answer are two nodes
    rig.retain(i32([*prompt, 5, 6]), 30)
    assert rig.cache.evict(5) == 5
    assert (rig.cache.match_len(prompt), rig.retentions.num_tokens, rig.retentions.num_live) == (17, 17, 1)
    rig.now_s = 20
    new = rig.put(2)
    assert rig.lost(prompt, new) == [2, 1]


def test_retention_ends_at_what_is_cached() -> None:
    rig = Rig()
    prompt = rig.put(1)
    rig.retain(i32([*prompt, 7, 8]), 30)
    assert rig.retentions.num_tokens == 10
    rig.retain(i32([99]), 30)
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (10, 1)
    check(rig.cache, rig.allocator)


def test_the_next_retention_of_a_session_replaces_the_last_one() -> None:
    rig = Rig()
    first, second = rig.put(1), rig.put(2)
    rig.retain(first, 30, session="s")
    rig.retain(second, 30, session="s")
    assert rig.retentions.num_live == 1
    assert rig.lost(first, second) == [1, 2]


def test_zero_seconds_end_the_retention_of_a_session() -> None:
    rig = Rig()
    first, second = rig.put(1), rig.put(2)
    rig.retain(first, 30, session="s")
    rig.retain(first, 0, session="s")
    assert rig.retentions.num_live == 0
    assert rig.lost(first, second) == [1, 2]


def test_a_session_belongs_to_its_tenant_and_namespace() -> None:
    rig = Rig()
    mine, salted = rig.put(1), rig.put(1, namespace="salt")
    rig.retain(mine, 30, tenant="a", session="s")
    rig.retain(mine, 0, tenant="b", session="s")
    rig.retain(salted, 30, tenant="a", session="s", space="salt")
    assert rig.retentions.num_live == 2
    rig.cache.evict(90)
    assert rig.retentions.num_live == 0


def test_shared_prefixes_count_once() -> None:
    rig = Rig()
    prompt = rig.put(1, 30)
    for i in range(4):
        put(rig.cache, rig.allocator, [*prompt, i, i])
        rig.retain(i32([*prompt, i, i]), 30)
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (38, 4)
    check(rig.cache, rig.allocator)


def test_over_the_limit_the_largest_tenant_pays_and_a_long_retention_buys_nothing() -> None:
    rig = Rig()
    small = rig.put(1)
    rig.retain(small, 5, tenant="small")
    greedy = [rig.put(i) for i in range(2, 8)]
    for prompt in greedy:
        rig.retain(prompt, 3600, tenant="greedy")
    assert (rig.retentions.num_tokens, rig.retentions.max_tokens) == (50, 50)
    rig.now_s = 4
    assert rig.lost(small, *greedy)[:3] == [2, 3, 1]  # the oldest two of the greedy tenant are no longer retained


def test_a_tenant_pays_only_for_what_is_still_cached() -> None:
    rig = Rig()
    prompt = rig.put(1, 20)
    put(rig.cache, rig.allocator, [*prompt, 5, 6])
    rig.retain(i32([*prompt, 5, 6]), 30, tenant="one")
    rig.retain(prompt, 30, tenant="other")
    for num_tokens, left in ((1, 21), (4, 17), (10, 7)):
        rig.cache.evict(num_tokens)
        tenants = rig.retentions._tenants
        assert [tenants[name].num_tokens for name in ("one", "other")] == [left, min(left, 20)]
    rig.cache.evict(7)
    assert not rig.retentions._tenants


def test_of_a_prefix_longer_than_the_limit_the_beginning_is_retained() -> None:
    rig = Rig()
    kept, long = rig.put(1), rig.put(2, 70)
    rig.retain(long, 30)
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (50, 1)
    new = rig.put(3)
    assert rig.cache.evict(40) == 40  # `kept`, 20 tokens of `long` that are not retained, and `new`
    assert [rig.cache.match_len(prompt) for prompt in (kept, long, new)] == [0, 50, 0]
    assert rig.cache.evict(20) == 20  # it is still no pin
    assert (rig.cache.match_len(long), rig.retentions.num_tokens) == (30, 30)
    check(rig.cache, rig.allocator)


def test_a_long_prefix_gets_what_other_tenants_have_left_of_the_limit() -> None:
    rig = Rig()
    other, own, long = rig.put(1, 15), rig.put(2), rig.put(3, 60)
    rig.retain(other, 3600, tenant="other")
    rig.retain(own, 3600, tenant="agent")
    rig.retain(long, 5, tenant="agent")
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (50, 2)
    rig.cache.evict(10 + 60 - 35)
    assert [rig.cache.match_len(prompt) for prompt in (other, own, long)] == [15, 0, 35]
    check(rig.cache, rig.allocator)


def test_what_has_lapsed_takes_nothing_from_a_new_retention() -> None:
    rig = Rig()
    lapsed, new = rig.put(1, 30), rig.put(2, 40)
    rig.retain(lapsed, 10, tenant="a")
    rig.now_s = 20
    rig.retain(new, 30, tenant="b")
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (40, 1)


def test_a_long_prefix_of_a_session_replaces_the_last_one_of_it() -> None:
    rig = Rig()
    for length in (60, 80, 100):
        if rig.allocator.num_free < length:
            rig.cache.evict(100)
        long = rig.put(1, length)
        rig.retain(long, 30, session="s")
        assert (rig.retentions.num_tokens, rig.retentions.num_live) == (50, 1)
    rig.retain(long, 0, session="s")
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (0, 0)


def test_many_retentions_of_the_same_tokens_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.mem_cache.retention.MAX_RETENTIONS", 8)
    assert MAX_RETENTIONS > 8
    rig = Rig()
    prompt = rig.put(1)
    for i in range(500):
        rig.retain(prompt, 30, session=str(i))
    assert (rig.retentions.num_live, rig.retentions.num_tokens) == (8, 10)
    assert len(rig.retentions._ends) < 100


def test_if_there_are_too_many_the_tenant_with_the_most_retentions_pays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tercet.mem_cache.retention.MAX_RETENTIONS", 8)
    rig = Rig()
    long, short = rig.put(1, 30), rig.put(2, 2)
    rig.retain(long, 30, tenant="quiet")
    for _ in range(20):
        rig.retain(short, 3600, tenant="greedy")
    assert rig.retentions.num_live == 8 and rig.cache.retained_size == 32


def test_discard_and_reset_end_retentions() -> None:
    rig = Rig()
    prompt, other = rig.put(1), rig.put(2)
    rig.retain(prompt, 30, session="s")
    rig.retain(other, 30)
    rig.cache.discard(prompt, 4)
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (10, 1)
    check(rig.cache, rig.allocator)
    rig.cache.reset()
    assert (rig.retentions.num_tokens, rig.retentions.num_live) == (0, 0)


def test_tokens_that_cost_more_and_were_used_again_stay_longer() -> None:
    """At the age at which prefixes are evicted, a token that costs a quarter more stays a quarter longer."""

    def rest(equal_cost_depth: float, num_uses: int = 2) -> list[int]:
        rig = Rig(equal_cost_depth=equal_cost_depth)
        long = rig.put(1, 40)
        for _ in range(40):  # ticks pass
            rig.cache.match(long)
        for _ in range(num_uses):
            node = rig.cache.match(long).node
            rig.cache.lock(node)
            rig.cache.unlock(node)
        short = rig.put(2)
        return rig.lost(long, short)

    assert rest(COSTS_EQUAL) == [1, 2]
    assert rest(equal_cost_depth=160) == [2, 1]
    assert rest(equal_cost_depth=160, num_uses=1) == [1, 2]


@given(turns=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(0, 3)), max_size=40))
def test_without_retention_and_at_equal_costs_the_order_is_lru(turns: list[tuple[int, int, int]]) -> None:
    rigs = [Rig("value"), Rig("lru")]
    for first, length, seconds in turns:
        for rig in rigs:
            rig.now_s += seconds
            if first == 0:
                rig.cache.evict(length)
                continue
            tokens = i32([first, *range(1000, 999 + length)])
            if rig.allocator.num_free < length:
                rig.cache.evict(length)
            put(rig.cache, rig.allocator, tokens)
        assert rigs[0].cache.audit().tolist() == rigs[1].cache.audit().tolist()


def test_another_policy_retains_nothing() -> None:
    rig = Rig("lru")
    assert rig.cache.retentions is None
    with pytest.raises(AssertionError, match="honours no retention"):
        rig.cache.retain(i32([1]), 30, NOBODY)


def test_evictions_visit_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention costs nothing where it is not used: no call for each node or leaf that stays."""
    rig = Rig()
    for i in range(9):
        rig.put(i)
    calls = 0
    counted: Callable[..., None] = Retentions.shorten

    def shorten(self: Retentions, *given: object) -> None:
        nonlocal calls
        calls += 1
        counted(self, *given)

    monkeypatch.setattr(Retentions, "shorten", shorten)
    rig.cache.evict(10)
    assert calls == 1


class CountedTime(float):
    """A time that counts its comparisons by `max`."""

    num_compared = 0

    def __add__(self, other: float) -> CountedTime:
        return CountedTime(float(self) + other)

    def __gt__(self, other: float) -> bool:
        CountedTime.num_compared += 1
        return float(self) > other


def test_many_retentions_of_one_prefix_do_not_compare_each_with_all_others() -> None:
    rig = Rig()
    tokens = rig.put(1)
    rig.now_s = CountedTime()
    for i in range(1000):
        rig.retain(tokens, 10 + i)
    rig.now_s = CountedTime(500)
    rig.cache.match(tokens)
    assert rig.retentions.num_live == 509
    rig.now_s = CountedTime(2000)
    rig.cache.match(tokens)
    assert rig.retentions.num_live == rig.retentions.num_tokens == 0
    assert CountedTime.num_compared < 10_000
    check(rig.cache, rig.allocator)
