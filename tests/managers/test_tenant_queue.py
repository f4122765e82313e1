"""The waiting queue of several tenants: whose turn it is, who gives way, and how much is ahead of a request."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_makers import make_kv, make_req
from scheduler_rig import Rig

from fakes import FakeClock
from tercet.managers.fair_policy import FairPolicy, make_policy
from tercet.managers.req import Req
from tercet.managers.tenant_queue import TenantLevel, TenantQueue
from tercet.managers.tenant_shares import TenantShares
from tercet.srt.errors import QueueFull
from tercet.srt.io_struct import AbortFinish

QUANTUM = 100


def of(tenant: str, arrival: int, urgency: int = 0, *, num_tokens: int = 50) -> Req:
    req = make_req([1] * num_tokens, arrival)
    req.tenant, req.urgency, req.queued_tokens = tenant, urgency, num_tokens
    return req


def queue_of(shares: TenantShares, on_join: Callable[[Req], None] = lambda req: None) -> TenantQueue:
    """All urgencies have the same shares."""
    return TenantQueue(lambda urgency: shares, on_join)


def filled(tenants: str, urgency: int = 0, weights: dict[str, float] | None = None) -> TenantQueue:
    """A letter for each request, in the order of arrival."""
    queue = queue_of(TenantShares(weights or {}, QUANTUM))
    for arrival, tenant in enumerate(tenants):
        queue.add(of(tenant, arrival, urgency))
    return queue


def refused(queue: TenantQueue, req: Req) -> int | None:
    found = queue.gives_way_to(req)
    return None if found is None else found.arrival


def test_tenants_take_turns_and_those_that_have_had_least_begin() -> None:
    queue = filled("aaabbc")
    queue._shares_of(0).charge("a", 10)
    assert [req.arrival for req in queue.in_turn(9)] == [3, 5, 0, 4, 1, 2]
    assert [req.arrival for req in queue.in_turn(4)] == [3, 5, 0, 4]
    queue.put_back([of("c", -1), of("d", -2, urgency=1)])
    assert [req.arrival for req in queue.in_turn(9)] == [-2, 3, -1, 0, 4, 5, 1, 2]
    assert [req.arrival for req in queue.in_turn(4)] == [-2, 3, -1, 0]
    assert list(queue) == sorted(queue, key=lambda req: req.place)


def test_it_knows_whether_several_tenants_wait() -> None:
    queue = filled("aa")
    assert not queue.has_several_tenants
    queue.add(other := of("b", 9, urgency=3))
    assert queue.has_several_tenants
    queue.remove(other)
    assert not queue.has_several_tenants


def test_it_knows_only_tenants_with_requests_and_those_that_joined_last_are_last() -> None:
    joined: list[str] = []
    queue = queue_of(TenantShares({}, QUANTUM), lambda req: joined.append(req.tenant))
    reqs = [of(tenant, arrival) for arrival, tenant in enumerate("aabac")]
    for req in reqs:
        queue.add(req)
    assert joined == ["a", "b", "c"]
    assert list(queue.tenants(0)) == ["a", "b", "c"] and not queue.tenants(1)
    queue.remove(reqs[2])
    queue.add(of("b", 9))
    assert joined == ["a", "b", "c", "b"]
    assert list(queue.tenants(0)) == ["a", "c", "b"]
    queue.add(of("b", 10, urgency=1))
    assert joined == ["a", "b", "c", "b", "b"], "each priority has its own"
    assert [level.tenants.keys() for level in queue.levels()] == [{"b"}, {"a", "b", "c"}]


@pytest.mark.parametrize(
    ("waiting", "arrives", "gives_way"),
    [
        ("aaaab", "b", 3),  # the newest of a, which has 4 places; b would have 2
        ("aaaab", "c", 3),
        ("aaaab", "a", None),
        ("aabb", "b", None),
        ("aaabb", "b", None),  # 3 places each would be no better
        ("abc", "d", None),
        ("aabc", "d", 1),
    ],
)
def test_of_a_full_queue_the_tenant_with_the_most_places_gives_way(
    waiting: str, arrives: str, gives_way: int | None
) -> None:
    assert refused(filled(waiting), of(arrives, 99)) == gives_way


def test_places_count_by_weight_and_of_equals_who_has_had_most_gives_way() -> None:
    assert refused(filled("aaaabb", weights={"a": 4.0}), of("c", 99)) == 5
    assert refused(filled("aaaab", weights={"b": 2.0}), of("b", 99)) == 3
    assert refused(filled("aab", weights={"b": 2.0}), of("b", 99)) == 1  # b would have 2 places for 2 shares
    assert refused(filled("aabb", weights={"b": 0.5}), of("a", 99)) == 3  # a would have 3 for 1, and b has 4
    assert refused(filled("aaabb", weights={"b": 0.5}), of("a", 99)) is None
    queue = filled("aabb")
    queue._shares_of(0).charge("a", 10)
    assert refused(queue, of("c", 99)) == 1


def test_a_tenant_whose_requests_have_output_does_not_give_way() -> None:
    queue = filled("aaabbc")
    for req in queue:
        req.output_ids = [5] if req.tenant == "a" else []
    assert refused(queue, of("d", 99)) == 4


class CountingShares(TenantShares):
    num_asked = 0

    def position(self, tenant: str) -> float:
        self.num_asked += 1
        return super().position(tenant)


def test_who_gives_way_is_found_in_a_time_that_does_not_grow_with_the_tenants() -> None:
    """A full queue asks for each request that arrives, and running requests wait meanwhile."""
    queue = queue_of(shares := CountingShares({}, QUANTUM))
    for arrival in range(4000):
        queue.add(of(f"t{arrival % 2000}", arrival))
    shares.num_asked = 0
    assert refused(queue, of("new", 9999)) == 3999 and shares.num_asked <= 100
    has_output = [req for req in queue if req.tenant != "t7"]
    for req in has_output:
        req.output_ids = [5]
    assert refused(queue, of("new", 9999)) == 2007, "the only one that may be refused"
    for req in list(queue):
        queue.remove(req)
    assert refused(queue, of("new", 9999)) is None


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from(["arrives", "leaves", "return"])), max_size=60))
@settings(deadline=None)
def test_tenants_and_the_one_with_the_most_places_are_known_after_any_changes(changes: list[tuple[str, str]]) -> None:
    weights = {"a": 2.0, "b": 0.5}
    queue = queue_of(TenantShares(weights, QUANTUM))
    waiting: list[Req] = []
    running: list[Req] = []
    for arrival, (tenant, change) in enumerate(changes):
        if change == "arrives":
            queue.add(req := of(tenant, arrival, num_tokens=1 + arrival))
            waiting.append(req)
        elif change == "return":
            queue.put_back(running)
            waiting, running = sorted([*waiting, *running], key=lambda req: req.arrival), []
        elif waiting:
            running.append(waiting.pop(len(waiting) // 2))
            queue.remove(running[-1])
    for name in "abcde":
        own = [req for req in waiting if req.tenant == name]
        kept = queue.tenants(0).get(name)
        assert (kept is None) == (not own)
        assert kept is None or (list(kept.reqs) == own and kept.num_tokens == sum(req.queued_tokens for req in own))
    places = {name: sum(req.tenant == name for req in waiting) / weights.get(name, 1.0) for name in "abcde"}
    for level in queue.levels():
        assert isinstance(level, TenantLevel)
        grouped = {(name, number) for number, names in level._by_places.items() for name in names}
        assert grouped == {(name, number) for name, number in places.items() if number}
        assert all(level._by_places.values()), "it forgets the numbers that no tenant has"
    found = queue.gives_way_to(of("new", 99))
    if max(places.values()) <= 1:
        assert found is None
    else:
        assert found is not None and places[found.tenant] == max(places.values())
        assert found == max((req for req in waiting if req.tenant == found.tenant), key=lambda req: req.arrival)


def test_urgency_goes_before_shares() -> None:
    queue = filled("ab")
    queue.put_back([of("a", 10 + number, urgency=1) for number in range(3)])
    assert refused(queue, of("a", 99, urgency=1)) == 1  # a less urgent one, and a has had no less
    for req in list(queue):
        if req.urgency == 0:
            queue.remove(req)
    assert refused(queue, of("a", 99, urgency=1)) is None
    assert refused(queue, of("b", 99, urgency=1)) == 12
    assert refused(queue, of("b", 99)) is None


@given(
    st.integers(5, 300).flatmap(
        lambda most: st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, most)), min_size=1, max_size=60)
    ),
    st.sampled_from("abcd"),
    st.tuples(*[st.integers(0, 500)] * 3),
    st.sampled_from([1.0, 2.0]),
)
@settings(deadline=None)
def test_what_is_served_before_a_new_request_is_ahead_of_it(
    backlog: list[tuple[str, int]], tenant: str, charged: tuple[int, ...], weight: float
) -> None:
    """The policy serves the queue up to the new request. It serves at most the estimate and the last request of each.

    The estimate is at most what it serves, and a quantum of each other tenant if the same tenant has more requests.
    """
    policy = make_policy(
        "dlpm", make_kv(1, radix=False), FakeClock(), tenant_weights={"a": weight}, max_prefill_tokens=4 * QUANTUM
    )
    assert isinstance(policy, FairPolicy)
    for name, num_tokens in zip("abc", charged, strict=True):
        policy.shares_of(0).charge(name, num_tokens)
    for arrival, (name, num_tokens) in enumerate(backlog):
        policy.waiting.add(of(name, arrival, num_tokens=num_tokens))
    new = of(tenant, 99)
    estimate = policy.waiting.num_tokens_before(new)
    policy.waiting.add(new)
    ordered = list(policy.order(policy.waiting))
    before = ordered[: ordered.index(new)]
    last = {req.tenant: req.queued_tokens for req in before}
    assert sum(req.queued_tokens for req in before) - sum(last.values()) <= estimate
    own = sum(num_tokens for name, num_tokens in backlog if name == tenant)
    assert own <= estimate
    others = {name for name, _ in backlog} - {tenant} if own else set()
    credit = sum(math.ceil(QUANTUM * (weight if name == "a" else 1)) for name in others)
    assert estimate <= sum(req.queued_tokens for req in before) + credit


def test_a_flood_of_one_tenant_does_not_refuse_the_requests_of_another() -> None:
    rig = Rig(policy="dlpm", max_queued=16, max_running=2, audit=False)
    for number in range(60):
        rig.add(f"large{number}", [number] * 20, tenant="large")
    rig.turn()
    for number in range(60):
        rig.add(f"large-again{number}", [number] * 20, tenant="large")
        if number % 10 == 0:
            rig.add(f"small{number}", [number] * 20, tenant="small")
        rig.turn()
    rig.run()
    refusals = {rid for rid, heard in rig.heard.items() if isinstance(heard.finish, AbortFinish)}
    assert len(refusals) > 60 and not any(rid.startswith("small") for rid in refusals)
    assert all(rig.heard[rid].finish.err_type == QueueFull.__name__ for rid in refusals)


def test_a_request_that_gives_way_leaves_the_queue_at_once() -> None:
    """Of many that arrive in one turn, each finds the places as they are."""
    rig = Rig(policy="dlpm", max_queued=8, max_running=1, audit=False)
    rig.add("runs", [1] * 5, max_new_tokens=50)
    rig.turn()
    for number in range(8):
        rig.add(f"a{number}", [1] * 5, tenant="a")
    rig.turn()
    for number in range(8):
        rig.add(f"b{number}", [1] * 5, tenant="b")
    rig.turn()
    assert sorted(req.rid for req in rig.scheduler.queues.waiting) == sorted(
        f"{name}{i}" for name in "ab" for i in range(4)
    )
    rig.run()
