"""The deficits of tenants, each number for itself, and the bound on the difference of their service."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.managers.tenant_shares import TenantShares

QUANTUM_TOKENS = 1024


def credit(shares: TenantShares, tenant: str) -> float:
    """In quanta of a tenant of weight 1."""
    return shares.round - shares.position(tenant)


def test_a_new_tenant_has_no_credit_and_a_choice_gives_all_a_quantum() -> None:
    shares = TenantShares({}, QUANTUM_TOKENS)
    shares.join("b")
    assert credit(shares, "a") == credit(shares, "b") == 0
    shares.charge_chosen("a", QUANTUM_TOKENS // 4)
    assert [credit(shares, tenant) for tenant in "abc"] == [0.75, 1, 0]
    shares.charge_chosen("a", QUANTUM_TOKENS)  # in credit, so no refill
    assert (credit(shares, "a"), credit(shares, "b")) == (-0.25, 1)
    shares.charge_chosen("b", QUANTUM_TOKENS)
    shares.charge_chosen("b", 0)
    assert (credit(shares, "a"), credit(shares, "b")) == (0.75, 1)


def test_a_weight_divides_the_charge() -> None:
    shares = TenantShares({"heavy": 4.0, "light": 0.5}, QUANTUM_TOKENS)
    for tenant in ("heavy", "light", "other"):
        shares.charge(tenant, QUANTUM_TOKENS)
    assert [credit(shares, tenant) for tenant in ("heavy", "light", "other")] == [-0.25, -2, -1]


def test_who_was_away_has_no_hoard_and_pays_what_is_left_of_a_debt() -> None:
    shares = TenantShares({}, QUANTUM_TOKENS)
    shares.charge_chosen("away", QUANTUM_TOKENS // 2)
    shares.charge_chosen("debtor", 200 * QUANTUM_TOKENS)
    for _ in range(100):
        shares.charge_chosen("busy", QUANTUM_TOKENS)
    assert credit(shares, "busy") == 0
    assert credit(shares, "away") <= 1  # one quantum at most, whatever it has missed
    assert -100 <= credit(shares, "debtor") < -90


def test_tenants_that_went_away_are_forgotten() -> None:
    shares = TenantShares({}, QUANTUM_TOKENS)
    for number in range(10_000):
        shares.charge_chosen(f"t{number}", 100 + number % 5000)
    assert len(shares) < 200
    shares.charge("t1", 10_000_000)
    for number in range(1000):
        shares.charge_chosen(f"u{number}", 1)
    assert credit(shares, "t1") < -1000  # not forgotten


def test_a_tenant_with_a_whole_quantum_keeps_it_while_others_come() -> None:
    shares = TenantShares({}, QUANTUM_TOKENS)
    shares.join("waits")
    shares.charge_chosen("other", QUANTUM_TOKENS)
    for number in range(1000):
        shares.charge(f"t{number}", 0)
    assert credit(shares, "waits") == 1


@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.25, 0.5, 2.0, 3.0])),
    start=st.integers(0, 3),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4096)), min_size=1, max_size=80),
)
def test_the_service_of_backlogged_tenants_differs_by_a_quantum_and_a_request(
    weights: dict[str, float], start: int, turns: list[tuple[int, int]]
) -> None:
    """Each request costs anything, and any tenant in credit may be chosen."""
    shares = TenantShares(weights, QUANTUM_TOKENS)
    for _ in range(start):
        shares.charge_chosen("earlier", 1500)
    for tenant in "abcd":
        shares.join(tenant)
    served = dict.fromkeys("abcd", 0.0)
    for pick, cost in turns:
        refilled = max(shares.round, math.floor(min(map(shares.position, "abcd"))) + 1)
        in_credit = [tenant for tenant in "abcd" if shares.position(tenant) < refilled]
        tenant = in_credit[pick % len(in_credit)]
        shares.charge_chosen(tenant, cost)
        served[tenant] += cost / weights.get(tenant, 1.0)
        worst = max(cost for _, cost in turns) / min([1.0, *weights.values()])
        assert max(served.values()) - min(served.values()) <= QUANTUM_TOKENS + worst


@pytest.mark.parametrize("flood", ["same name", "new names"])
def test_a_tenant_in_debt_is_served_again_whatever_the_others_do(flood: str) -> None:
    """Others always have requests, and their clients may change their names with each one."""
    shares = TenantShares({}, QUANTUM_TOKENS)
    shares.charge("debtor", 20 * QUANTUM_TOKENS)
    for number in range(30 * QUANTUM_TOKENS // 100):
        name = "other" if flood == "same name" else f"new {number}"
        shares.join(name)
        lowest = min(shares.position("debtor"), shares.position(name))
        if lowest == shares.position("debtor"):
            return
        shares.charge_chosen(name, 100)
    raise AssertionError("starved")


@given(charges=st.lists(st.integers(0, 5 * QUANTUM_TOKENS), min_size=1, max_size=6), num_refills=st.integers(0, 3))
def test_who_joins_catches_up_with_the_least(charges: list[int], num_refills: int) -> None:
    shares = TenantShares({}, QUANTUM_TOKENS)
    for number, num_tokens in enumerate(charges):
        shares.charge(str(number), num_tokens)
    for _ in range(num_refills):
        shares.charge_chosen("0", QUANTUM_TOKENS // 2)
    names = [str(number) for number in range(len(charges))]
    wanted = max(shares.round, math.floor(min(map(shares.position, names))))
    shares.catch_up(names)
    assert shares.round == wanted
