"""The rules of the queue, of the expected memory and of retraction, each number for itself."""

from __future__ import annotations

import pytest
from kv_makers import make_kv, make_req, put_into_cache

from tercet.managers.schedule_policy import (
    CLIP_MAX_NEW_TOKENS,
    LPM_MAX_WAITING,
    MAX_PASSED_OVER,
    NewTokenRatio,
    expected_growth,
    make_policy,
    retraction_order,
)


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


@pytest.mark.parametrize(("num_waiting", "is_sorted"), [(LPM_MAX_WAITING, True), (LPM_MAX_WAITING + 1, False)])
def test_lpm_sorts_a_short_queue_only(num_waiting: int, is_sorted: bool) -> None:
    kv = make_kv(1)
    put_into_cache(kv, [1] * 9)
    waiting = [make_req([0] * 12, arrival) for arrival in range(num_waiting - 1)]
    waiting.append(make_req([1] * 12, num_waiting))
    assert (names(make_policy("lpm", kv).order(waiting))[0] == num_waiting) == is_sorted


def test_the_limits_of_lpm() -> None:
    assert (LPM_MAX_WAITING, MAX_PASSED_OVER) == (128, 32)


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="fcfs, lpm; got 'random'"):
        make_policy("random", make_kv(1))


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
    assert ratio.value == 0.0


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
    assert names(retraction_order(running)) == [4, 3, 1, 2, 0, 5]
    assert names(running) == [0, 1, 2, 3, 4, 5]
