"""The rules of the queue, of the expected memory and of retraction, each number for itself."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from kv_makers import make_kv, make_req, put_into_cache

from fakes import FakeClock
from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.req import Req
from tercet.managers.schedule_policy import (
    CLIP_MAX_NEW_TOKENS,
    MAX_PASSED_OVER,
    MAX_SORTED,
    POLICIES,
    NewTokenRatio,
    SchedulePolicy,
    expected_growth,
    retraction_order,
)
from tercet.srt.server_args import ServerArgs


def make_policy(name: str, kv: KVCacheManager, seed: int = 0) -> SchedulePolicy:
    clock = FakeClock()
    clock.now = 100.0
    return SchedulePolicy(name, kv, clock, seed)


def names(reqs) -> list[int]:
    return [req.arrival for req in reqs]


# The order of the queue


def test_fcfs_is_the_order_of_arrival() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [2] * 10)
    waiting = [make_req([token] * 12, arrival) for arrival, token in enumerate([1, 2, 3])]
    waiting[2].passed_over = MAX_PASSED_OVER
    assert names(make_policy("fcfs", kv).order(waiting)) == [0, 1, 2]


def test_lpm_is_the_longest_cached_prefix_first_and_equal_ones_in_the_order_of_arrival() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 5)
    put_into_cache(kv, [2] * 9)
    waiting = [make_req([token] * 12, arrival) for arrival, token in enumerate([0, 1, 2, 0, 2, 1])]
    assert names(make_policy("lpm", kv).order(waiting)) == [2, 4, 1, 5, 0, 3]


def test_lpm_looks_into_the_request_s_own_namespace() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9, salt="a")
    waiting = [make_req([1] * 12, 0), make_req([1] * 12, 1, salt="b"), make_req([1] * 12, 2, salt="a")]
    assert names(make_policy("lpm", kv).order(waiting)) == [2, 0, 1]


def test_lpm_lets_those_go_first_who_were_passed_over_often_enough() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9)
    waiting = [make_req([token] * 12, arrival) for arrival, token in enumerate([1, 0, 0, 0, 1])]
    waiting[1].passed_over = MAX_PASSED_OVER - 1
    waiting[2].passed_over = MAX_PASSED_OVER
    waiting[3].passed_over = MAX_PASSED_OVER + 9  # no more than enough counts
    assert names(make_policy("lpm", kv).order(waiting)) == [2, 3, 0, 4, 1]


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.reads_cache])
@pytest.mark.parametrize(("num_waiting", "is_sorted"), [(MAX_SORTED, True), (MAX_SORTED + 1, False)])
def test_a_policy_that_reads_the_cache_sorts_a_short_queue_only(policy: str, num_waiting: int, is_sorted: bool) -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9)
    waiting = [make_req([0] * 12, arrival) for arrival in range(num_waiting - 1)]
    waiting.append(make_req([1] * 12, num_waiting))
    assert (names(make_policy(policy, kv).order(waiting))[0] == num_waiting) == is_sorted


@pytest.mark.parametrize("policy", ["lof", "random"])
def test_a_policy_that_reads_no_cache_sorts_the_first_of_a_long_queue(policy: str) -> None:
    waiting = [make_req([0], arrival, max_new_tokens=arrival + 1) for arrival in range(MAX_SORTED + 3)]
    ordered = names(make_policy(policy, make_kv(1)).order(waiting))
    assert sorted(ordered[:MAX_SORTED]) == list(range(MAX_SORTED)) != ordered[:MAX_SORTED]
    assert ordered[MAX_SORTED:] == [MAX_SORTED, MAX_SORTED + 1, MAX_SORTED + 2]


def test_dfs_weight_goes_down_the_branch_that_most_requests_continue() -> None:
    kv = make_kv(1)
    for branch in ([1, 2, 3, 4], [1, 2, 7, 8], [5, 5, 5, 5, 5, 5]):
        put_into_cache(kv, branch)
    prompts = [[9], [5] * 6, [1, 2, 0], [1, 2, 7, 8], [1, 2, 3, 4], [9, 9], [1, 2, 3, 4, 4], [5] * 5]
    waiting = [make_req([*prompt, 0, 0], arrival) for arrival, prompt in enumerate(prompts)]
    # Four are below [1, 2]: two in [3, 4], one in [7, 8], one at its end. Two are below [5, ...]. Two are cold.
    assert names(make_policy("dfs-weight", kv).order(waiting)) == [4, 6, 3, 2, 1, 7, 0, 5]


def test_lof_is_the_longest_output_first() -> None:
    waiting = [make_req([0], arrival, max_new_tokens=wish) for arrival, wish in enumerate([5, 9, 5, 30])]
    waiting[3].output_ids += [1] * 25
    assert names(make_policy("lof", make_kv(1)).order(waiting)) == [1, 0, 2, 3]


def test_random_is_another_order_for_another_seed_and_the_same_for_the_same() -> None:
    waiting = [make_req([0], arrival) for arrival in range(50)]
    kv = make_kv(1)
    orders = [names(make_policy("random", kv, seed).order(waiting)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(order) == list(range(50)) != order for order in orders)
    assert names(make_policy("random", kv).order(waiting[10:])) == [name for name in orders[0] if name >= 10]


def test_shortest_prefill_first_counts_the_tokens_that_are_not_cached() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 20)
    waiting = [make_req(prompt, arrival) for arrival, prompt in enumerate([[0] * 9, [1] * 24, [0] * 3, [0] * 9])]
    assert names(make_policy("shortest-prefill-first", kv).order(waiting)) == [2, 1, 0, 3]


def test_hrrn_compares_the_wait_with_the_tokens_that_are_not_cached() -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 20)
    waiting = []
    for arrival, (prompt, arrived_s) in enumerate([([0] * 9, 10.0), ([1] * 30, 20.0), ([0] * 3, 80.0), ([0], 95.0)]):
        waiting.append(make_req(prompt, arrival))
        waiting[-1].arrived_s = arrived_s
    # 90 s for 9 tokens, 80 s for 10, 20 s for 3, 5 s for 1.
    assert names(make_policy("hrrn", kv).order(waiting)) == [0, 1, 2, 3]
    waiting[3].arrived_s = 89.0
    assert names(make_policy("hrrn", kv).order(waiting)) == [3, 0, 1, 2]


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if policy.order is not None])
def test_under_every_policy_the_aged_go_first(policy: str) -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9)
    waiting = [make_req([1] * (12 - arrival), arrival, max_new_tokens=arrival + 1) for arrival in range(9)]
    for aged in (2, 5):
        waiting[aged].passed_over = MAX_PASSED_OVER
    ordered = names(make_policy(policy, kv).order(waiting))
    assert ordered[:2] == [2, 5] and sorted(ordered) == list(range(9))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_orders_all_requests_without_a_radix_cache(policy: str) -> None:
    waiting = [make_req([0] * (arrival + 1), arrival) for arrival in range(5)]
    assert sorted(names(make_policy(policy, make_kv(1, radix=False)).order(waiting))) == list(range(5))


def test_the_command_line_has_the_policies_of_the_table() -> None:
    choices = get_args(get_args(get_type_hints(ServerArgs, include_extras=True)["schedule_policy"])[0])
    assert choices == tuple(POLICIES)


def test_all_that_wait_before_the_last_of_those_that_were_admitted_age() -> None:
    waiting = [make_req([0], arrival) for arrival in (1, 5, 9)]
    make_policy("lpm", make_kv(1)).on_admitted([make_req([0], arrival) for arrival in (3, 7, 4)], waiting)
    assert [req.passed_over for req in waiting] == [1, 1, 0]


def test_the_limits_of_the_queue() -> None:
    assert (MAX_SORTED, MAX_PASSED_OVER) == (128, 32)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fcfs, lpm, .*, dlpm; got 'best'"):
        make_policy("best", make_kv(1))


# The memory that running requests are expected to need


@pytest.mark.parametrize(
    ("max_new_tokens", "num_output", "expected"),
    [(100, 0, 100), (100, 30, 70), (100, 100, 0), (4096, 0, 4096), (4097, 0, 4096), (9000, 8000, 1000)],
)
def test_a_request_is_expected_to_use_what_is_left_of_its_wish_clipped(
    max_new_tokens: int, num_output: int, expected: int
) -> None:
    assert expected_growth(make_req([1], output=[5] * num_output, max_new_tokens=max_new_tokens)) == expected
    assert CLIP_MAX_NEW_TOKENS == 4096


@pytest.mark.parametrize(("conservativeness", "start"), [(1.0, 0.7), (0.5, 0.35), (1.2, 0.84), (2.0, 1.0)])
def test_the_ratio_decays_linearly_over_600_decode_steps_to_a_share_of_its_start(
    conservativeness: float, start: float
) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert ratio.value == pytest.approx(start)
    seen = []
    for _ in range(700):
        ratio.on_decode()
        seen.append(ratio.value)
    assert seen[299] == pytest.approx(start * (1 + 0.14) / 2)
    assert seen[598] > start * 0.14 * 1.005
    assert seen[599] == pytest.approx(start * 0.14)
    assert seen[699] == seen[600] == start * 0.14
    ratio.on_idle()
    assert ratio.value == pytest.approx(start)


def test_after_a_retraction_the_ratio_is_what_those_who_stay_have_used_and_20_tokens_each() -> None:
    ratio = NewTokenRatio(1.0)
    kept = [make_req([1], output=[5] * 30, max_new_tokens=200), make_req([1], output=[5] * 10, max_new_tokens=300)]
    ratio.on_retract(kept)
    assert ratio.value == (30 + 20 + 10 + 20) / 500
    ratio.on_retract([make_req([1], output=[5] * 90, max_new_tokens=100)])
    assert ratio.value == 1.0
    ratio.on_retract([])
    assert ratio.value == 1.0


def test_running_requests_reserve_their_share_and_those_that_ignore_eos_all() -> None:
    ratio = NewTokenRatio(1.0)
    ratio.value = 0.25
    running = [
        make_req([1], output=[5] * 20, max_new_tokens=100),  # 80 left
        make_req([1], max_new_tokens=10_000),  # 4096 at most
        make_req([1], output=[5] * 3, max_new_tokens=50, ignore_eos=True),  # all 47
    ]
    assert ratio.reserved_by(running) == 80 * 0.25 + 4096 * 0.25 + 47
    assert ratio.reserved_by([]) == 0


# Who gives way first


def test_retraction_begins_with_the_fewest_outputs_then_the_longest_prompt_then_the_latest_arrival() -> None:
    running = [
        make_req([1] * 9, 0, output=[5] * 3),
        make_req([1] * 9, 1, output=[5] * 2),
        make_req([1] * 3, 2, output=[5] * 2),
        make_req([1] * 9, 3, output=[5] * 2),
        make_req([1] * 1, 4, output=[5] * 1),
        make_req([1] * 99, 5, output=[5] * 4),
    ]
    assert names(retraction_order(running, [])) == [4, 3, 1, 2, 0, 5]
    assert names(running) == [0, 1, 2, 3, 4, 5]
    in_chunks = {make_req([1] * 9, 7): None, make_req([1] * 9, 6): None}
    assert names(retraction_order(running, in_chunks)) == [4, 3, 1, 2, 0, 7, 6, 5]


def test_the_least_urgent_are_retracted_first_whatever_they_have() -> None:
    def of(urgency: int, arrival: int, num_outputs: int) -> Req:
        req = make_req([1] * 9, arrival, output=[5] * num_outputs)
        req.urgency = urgency
        return req

    decodes = [of(1, 0, 9), of(0, 1, 30), of(2, 2, 1), of(0, 3, 20), of(2, 4, 2)]
    assert names(retraction_order(decodes, [])) == [3, 1, 0, 2, 4]
    assert names(retraction_order(decodes, [of(2, 5, 0), of(0, 6, 0)])) == [3, 1, 6, 0, 2, 5, 4]
    # An urgent prompt in chunks goes after the last one that decodes.
    assert names(retraction_order(decodes[:2], [of(2, 5, 0)])) == [1, 0, 5]
