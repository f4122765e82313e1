"""The order of the policy `dlpm`: who goes first, who ages, and what is charged."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from kv_makers import admit, make_kv, make_req, put_into_cache
from scheduler_rig import Rig

from fakes import FakeClock, expected_output
from tercet.managers.fair_policy import OUTPUT_TOKEN_COST, FairPolicy, make_policy
from tercet.managers.req import Req
from tercet.managers.schedule_policy import MAX_PASSED_OVER, MAX_SORTED, POLICIES
from tercet.managers.tenant_shares import TenantShares

QUANTUM_TOKENS = 1024


def make(kv, weights: dict[str, float] | None = None) -> FairPolicy:
    policy = make_policy("dlpm", kv, FakeClock(), tenant_weights=weights, max_prefill_tokens=4 * QUANTUM_TOKENS)
    assert isinstance(policy, FairPolicy)
    return policy


def of(tenant: str, arrival: int, prompt: list[int], urgency: int = 0) -> Req:
    req = make_req(prompt, arrival)
    req.tenant, req.urgency = tenant, urgency
    return req


def order(policy: FairPolicy, waiting: list[Req]) -> list[Req]:
    """The order of these requests. No other ones wait."""
    for req in list(policy.waiting):
        policy.waiting.remove(req)
    policy.waiting.put_back(waiting)
    return list(policy.order(policy.waiting))


def names(reqs) -> list[int]:
    return [req.arrival for req in reqs]


@pytest.mark.parametrize("name", POLICIES)
def test_only_dlpm_has_shares(name: str) -> None:
    assert isinstance(make_policy(name, make_kv(1), FakeClock(), max_prefill_tokens=64), FairPolicy) == (name == "dlpm")


def test_of_those_in_credit_the_longest_prefix_goes_first() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9)
    policy = make(kv)
    waiting = [of("a", 0, [2] * 12), of("b", 1, [1] * 12), of("a", 2, [1] * 7), of("b", 3, [3] * 12)]
    assert names(order(policy, waiting)) == [1, 2, 0, 3]
    policy.shares_of(0).charge("b", QUANTUM_TOKENS)
    assert names(order(policy, waiting)) == [2, 0, 1, 3]


def test_within_one_pass_a_tenant_that_has_spent_its_quantum_lets_the_others_go() -> None:
    policy = make(make_kv(1), {"c": 2.0})
    half = QUANTUM_TOKENS // 2
    waiting = [of("a", i, [1] * half) for i in range(5)] + [of("b", 5 + i, [2] * half) for i in range(3)]
    waiting += [of("c", 8 + i, [3] * half) for i in range(6)]
    assert names(order(policy, waiting)) == [0, 1, 5, 6, 8, 9, 10, 11, 2, 3, 7, 12, 13, 4]


def test_more_urgent_requests_go_first_whoever_sends_them() -> None:
    policy = make(make_kv(1))
    policy.shares_of(0).charge("a", 100 * QUANTUM_TOKENS)
    waiting = [of("a", 2, [1], urgency=5), of("b", 0, [1]), of("a", 1, [1]), of("b", 3, [1])]
    assert names(order(policy, waiting)) == [2, 0, 3, 1]


def test_an_urgent_request_does_not_pay_the_debt_of_its_tenant() -> None:
    policy = make(make_kv(1))
    policy.shares_of(0).charge("a", 100 * QUANTUM_TOKENS)
    urgent, other = of("a", 1, [1], urgency=5), of("b", 0, [1])
    order(policy, [urgent, other])
    policy.waiting.remove(urgent)
    policy.on_admitted([urgent], [other])
    assert policy.shares_of(0).position("a") - policy.shares_of(0).round >= 100


def test_a_newcomer_has_no_credit_while_less_urgent_requests_wait_for_ever() -> None:
    """The use of each priority is shared by itself. Otherwise the refills of the urgent requests would wait, too."""
    policy = make(make_kv(1))
    old, new, waits = (
        of(tenant, i, [1] * 4, urgency) for i, (tenant, urgency) in enumerate([("a", 5), ("b", 5), ("c", 0)])
    )
    policy.waiting.add(waits)
    for number in range(50):
        policy.waiting.add(more := of("a", 10 + number, [1] * QUANTUM_TOKENS, urgency=5))
        policy.waiting.remove(more)
        policy.on_admitted([more], [waits])
    policy.waiting.add(old)
    policy.waiting.add(new)
    urgent = policy.shares_of(5)
    assert urgent.position("a") >= 49 and abs(urgent.position("a") - urgent.position("b")) <= 1
    assert policy.shares_of(0).position("a") == policy.shares_of(0).position("c") == 0


def test_a_newcomer_gets_its_share_beside_an_urgent_tenant_while_less_urgent_requests_wait() -> None:
    rig = Rig(policy="dlpm", pool_size=1024, max_running=4, preemption_threshold=9, overlap=False, audit=False)

    numbers = count()

    def run(tenants: str, num_turns: int) -> list[int]:
        """Each of the tenants always has four requests waiting. Returns how many of each have ended."""
        num_before = len(rig.ended)
        for _ in range(num_turns):
            for tenant in tenants:
                for _ in range(4 - sum(req.tenant == tenant for req in rig.scheduler.queues.waiting)):
                    number = next(numbers)
                    prompt = [number % 97, number // 97, *[5] * 62]
                    rig.add(f"{tenant}{number}", prompt, priority=1, tenant=tenant, max_new_tokens=1)
            rig.turn()
        ended = rig.ended[num_before:]
        return [sum(rid[0] == tenant for rid in ended) for tenant in tenants]

    run("a", 4)
    rig.add("c", [1] * 40, tenant="c")
    run("a", 100)
    a, b = run("ab", 100)
    assert rig.scheduler.queues.find("c") is not None and min(a, b) > 0.4 * (a + b) > 30


def test_priorities_without_requests_are_forgotten() -> None:
    """Clients choose them."""
    policy = make(make_kv(1))
    policy.waiting.add(stays := of("a", 0, [1], urgency=-1))
    policy.on_admitted([stays], [])
    policy.shares_of(-1).charge("a", 3 * QUANTUM_TOKENS)
    for number in range(1000):
        policy.waiting.add(req := of("a", number + 1, [1], urgency=number))
        policy.waiting.remove(req)
        policy.on_end(req)
    assert len(policy._shares) < 100
    assert policy.shares_of(-1).position("a") > 3, "it has a request"
    policy.on_end(stays)
    assert not policy._num_admitted


def test_a_long_queue_is_sorted_for_every_tenant() -> None:
    policy = make(make_kv(1))
    waiting = [of("flood", i, [1] * 64) for i in range(2 * MAX_SORTED)]
    waiting += [of("small", 1000 + i, [1] * 64) for i in range(2)]
    ordered = names(order(policy, waiting))
    assert sorted(ordered) == names(waiting)
    assert {1000, 1001} <= set(ordered[: 2 + QUANTUM_TOKENS // 64])


@pytest.mark.parametrize("num_urgent", [1, MAX_SORTED // 2, 2 * MAX_SORTED])
def test_in_a_long_queue_of_several_priorities_the_tenants_take_turns_within_each(num_urgent: int) -> None:
    policy = make(make_kv(1))
    waiting = [of("flood", i, [1] * 64, urgency=int(i < num_urgent)) for i in range(4 * MAX_SORTED)]
    waiting += [of("small", 1000, [1] * 64), of("small", 1001, [1] * 64, urgency=1)]
    ordered = order(policy, waiting)
    assert sorted(names(ordered)) == names(waiting)
    urgencies = [req.urgency for req in ordered]
    assert urgencies == sorted(urgencies, reverse=True)
    in_turn = QUANTUM_TOKENS // 64
    assert ordered.index(waiting[-1]) <= in_turn
    if num_urgent < MAX_SORTED:
        assert ordered.index(waiting[-2]) <= num_urgent + 1 + in_turn


def test_a_request_ages_by_the_later_ones_of_its_own_tenant() -> None:
    kv = make_kv(1)
    policy = make(kv)
    waiting = [of("a", 0, [1]), of("b", 1, [1]), of("a", 2, [1]), of("b", 5, [1])]
    admitted = [of("a", 3, [1]), of("c", 9, [1])]
    order(policy, waiting)
    policy.on_admitted(admitted, waiting)
    assert [req.passed_over for req in waiting] == [1, 0, 1, 0]


def test_who_was_passed_over_too_often_goes_before_the_others_of_its_tenant() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9)
    policy = make(kv)
    waiting = [of("a", 0, [2] * 12), of("a", 1, [1] * 12), of("b", 2, [1] * 12), of("b", 3, [2] * 12)]
    waiting[0].passed_over = MAX_PASSED_OVER
    assert names(order(policy, waiting)) == [0, 1, 2, 3]
    policy.shares_of(0).charge("a", 2 * QUANTUM_TOKENS)  # age does not lend credit
    assert names(order(policy, waiting)) == [2, 3, 0, 1]


def test_computed_prompt_tokens_and_output_tokens_are_charged_once() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 30)
    policy = make(kv)
    req, other = of("a", 0, [1] * 50), [of("b", 9, [1]), of("c", 9, [1])]
    order(policy, [req, *other])
    admit(kv, req)
    policy.on_admitted([req], [])
    spent = 20
    assert policy.shares_of(0).position("a") == spent / QUANTUM_TOKENS
    for more in ([5] * 3, [], [5]):
        req.output_ids += more
        spent += OUTPUT_TOKEN_COST * len(more)
        order(policy, other)
        assert policy.shares_of(0).position("a") == spent / QUANTUM_TOKENS
    req.output_ids.append(5)
    policy.on_end(req)
    assert policy.shares_of(0).position("a") == (spent + OUTPUT_TOKEN_COST) / QUANTUM_TOKENS
    policy.on_end(other[0])  # it has never run
    assert not policy._num_charged


@pytest.mark.parametrize("seed", range(4))
def test_backlogged_tenants_get_service_by_their_weights(seed: int) -> None:
    """Whole schedules on the fake model: random prompts, outputs, prefixes, page sizes. The tokens are those of any
    schedule, and the service of the tenants differs by no more than the bound of TenantShares."""
    rng = Random(seed)
    weights = {"a": 1.0, "b": rng.choice([1.0, 2.0])}
    rig = Rig(
        pool_size=8192, max_running=4, page_size=rng.choice([1, 4]), policy="dlpm", tenant_weights=weights,
        overlap=rng.random() < 0.5, mixed=rng.random() < 0.5, audit=False, context_len=512, max_prefill_tokens=256,
        chunked_prefill_size=128,
    )  # fmt: skip
    sent, prompts = dict.fromkeys("ab", 0), {}
    policy, quantum = rig.planner._policy, 256 // 4
    assert isinstance(policy, FairPolicy)
    gaps = []
    for turn in range(400):
        for tenant in "ab":
            while sent[tenant] - sum(rig.heard[rid].finish is not None for rid in prompts if rid[0] == tenant) < 12:
                rid = f"{tenant}{sent[tenant]}"
                head = [ord(tenant) % 97] * rng.choice([0, 40])
                prompts[rid] = (head + [rng.randrange(97) for _ in range(rng.randrange(20, 200))], rng.randrange(1, 30))
                rig.add(rid, prompts[rid][0], max_new_tokens=prompts[rid][1], tenant=tenant)
                sent[tenant] += 1
        rig.turn()
        if turn > 5:
            gaps.append(abs(policy.shares_of(0).position("a") - policy.shares_of(0).position("b")) * quantum)
    # A quantum, a prompt, and the outputs of all rows.
    assert max(gaps) <= quantum + 240 + 4 * 30 * OUTPUT_TOKEN_COST
    assert policy.shares_of(0).round >= 50  # they were charged
    assert all(req.passed_over <= MAX_PASSED_OVER for req in rig.scheduler.queues.live())
    rig.run()
    for rid, (prompt, max_new_tokens) in prompts.items():
        assert rig.heard[rid].ids == expected_output(prompt, 1, max_new_tokens, 97)
    assert not (policy._num_charged or policy.waiting)


@pytest.mark.parametrize("rest", [0, 200])
def test_what_a_tenant_used_alone_costs_it_nothing_later(rest: int) -> None:
    """One tenant has had long outputs alone. Then another one floods the engine, at once or after a rest."""
    rng = Random(rest)
    rig = Rig(pool_size=8192, max_running=8, policy="dlpm", audit=False, context_len=512, overlap=False)
    num_sent = dict.fromkeys("ab", 0)

    def add(tenant: str, max_new_tokens: int) -> None:
        num_sent[tenant] += 1
        prompt = [rng.randrange(97) for _ in range(30)]
        rig.add(f"{tenant}{num_sent[tenant]}", prompt, tenant=tenant, max_new_tokens=max_new_tokens)

    for _ in range(8):
        add("a", 300)
    for _ in range(290 + rest):
        rig.turn()
    assert rig.is_busy == (not rest)
    for _ in range(200):
        for tenant in "ba":
            for _ in range(4 - sum(req.tenant == tenant for req in rig.scheduler.queues.waiting)):
                add(tenant, 5)
        rig.turn()
    num_done = [sum(rig.heard[f"{one}{number}"].finish is not None for number in range(9, 900)) for one in "ab"]
    assert min(num_done) > 0.4 * sum(num_done) > 20


def test_a_tenant_that_joins_has_as_much_as_those_that_are_there() -> None:
    policy = make(make_kv(1))
    there, leaves, joins = of("a", 0, [1] * 4), of("b", 1, [1] * 4), of("c", 2, [1] * 4)
    order(policy, [there, leaves])
    for tenant, quanta in (("a", 50), ("b", 80)):
        policy.shares_of(0).charge(tenant, quanta * QUANTUM_TOKENS)
    policy.waiting.add(joins)
    assert policy.shares_of(0).position("c") == policy.shares_of(0).position("a") == 50  # not 0, and not that of b
    for req in (there, leaves, joins):
        policy.waiting.remove(req)
    policy.waiting.add(joins)
    assert len({policy.shares_of(0).position(tenant) for tenant in "abc"}) == 1  # nobody had requests


def test_many_tenants_that_join_do_not_look_at_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, num_looks = make(make_kv(1)), 0
    position = TenantShares.position

    def looked_at(shares: TenantShares, tenant: str) -> float:
        nonlocal num_looks
        num_looks += 1
        return position(shares, tenant)

    monkeypatch.setattr(TenantShares, "position", looked_at)
    for number in range(1000):
        policy.waiting.add(of(f"t{number}", number, [1] * 4))
    assert num_looks < 3000
