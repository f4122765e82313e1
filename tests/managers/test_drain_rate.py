"""What the limits of the queue measure and keep: the rate of the last seconds, and when refused clients return."""

from __future__ import annotations

import pytest
from kv_makers import make_req
from scheduler_rig import Rig

from fakes import FakeClock
from tercet.managers import queue_limits
from tercet.managers.queue_limits import DrainRate, QueueLimits
from tercet.srt.errors import QueueFull

STEADY = 100
"""Tokens per second."""


def drain(rate: DrainRate, clock: FakeClock, *num_tokens: int) -> None:
    """One drain each second, while others wait."""
    for num in num_tokens:
        clock.now += 1.0
        rate.add(num, others_wait=True)


def make_limits(**settings: object) -> tuple[Rig, QueueLimits]:
    """The limits of a scheduler, after some drains."""
    rig = Rig(max_queue_time_s=10.0, overlap=False, **settings)
    limits = rig.scheduler._queue_limits
    drain(limits._rate, rig.clock, 0, *[STEADY] * 6)
    return rig, limits


def test_the_rate_is_that_of_a_whole_window() -> None:
    clock = FakeClock()
    rate = DrainRate(clock)
    drain(rate, clock, 0, 10 * STEADY, *[STEADY] * (int(queue_limits._WINDOW_S) - 1))
    assert rate.tokens_per_s == pytest.approx(1.9 * STEADY)
    drain(rate, clock, STEADY)
    assert rate.tokens_per_s == pytest.approx(STEADY)


def test_many_short_drains_take_little_memory() -> None:
    clock = FakeClock()
    rate = DrainRate(clock)
    for _ in range(3 * queue_limits._MAX_KEPT):
        clock.now += 0.001
        rate.add(1, others_wait=True)
    assert len(rate._drains) == queue_limits._MAX_KEPT


def test_the_time_after_all_that_waited_have_left_is_not_measured() -> None:
    """They were aborted, so no step drained the queue."""
    rig, limits = make_limits()
    rig.clock.now += 50.0
    limits.on_arrival(make_req([1]))
    assert limits._rate.tokens_per_s == pytest.approx(STEADY)


def test_the_time_of_a_pause_is_not_measured() -> None:
    rig, limits = make_limits()
    limits.on_pause()
    rig.clock.now += 50.0
    assert limits._rate.tokens_per_s == pytest.approx(STEADY)


def test_the_rest_of_prompts_in_chunks_is_ahead_of_a_new_request() -> None:
    rig, limits = make_limits(max_running=1)
    rig.add("in chunks", [1] * 200)
    rig.turn()
    rig.add("waits", [2] * 30)
    rig.turn()
    (in_chunks,) = rig.scheduler.queues.unfinished
    assert 0 < in_chunks.kv_len < 200
    assert limits._tokens_before(make_req([3] * 9)) == 200 - in_chunks.kv_len + 30


def test_refused_clients_return_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one when the wait is down to the limit, each later one when those before it have left the queue."""
    _, limits = make_limits()
    monkeypatch.setattr(limits, "_tokens_before", lambda req: 25 * STEADY)
    for place in range(3):
        req = make_req([1] * STEADY)
        req.queued_tokens = STEADY
        with pytest.raises(QueueFull, match=r"would wait about 25\.0 s, and --max-queue-time is 10 s") as caught:
            limits.check_wait(req)
        assert caught.value.retry_after_s == 15 + place


def test_tenants_whose_clients_may_return_are_forgotten() -> None:
    rig, limits = make_limits(policy="dlpm")
    for number in range(100):
        req = make_req([1])
        req.tenant = f"t{number}"
        assert limits._retry_after_s(req, 1.0, 1.0) == 1
        rig.clock.now += 10.0
    assert len(limits._next_return_s) == 1


def test_a_few_long_drains_are_kept_until_they_are_old() -> None:
    clock = FakeClock()
    rate = DrainRate(clock)
    rate.add(0, others_wait=True)
    for _ in range(2 * queue_limits._MIN_KEPT):
        clock.now += queue_limits._WINDOW_S
        rate.add(STEADY, others_wait=True)
    assert len(rate._drains) == queue_limits._MIN_KEPT
    rate.stop()
    clock.now += queue_limits._MAX_AGE_S + 1
    assert rate.tokens_per_s is None


@pytest.mark.parametrize("num_tokens", [-STEADY, 0])
def test_a_queue_that_did_not_shrink_has_no_rate(num_tokens: int) -> None:
    """A retracted request counts as more than it was, before all of its chunks are computed."""
    clock = FakeClock()
    rate = DrainRate(clock)
    drain(rate, clock, 0, *[num_tokens] * 6)
    assert rate.tokens_per_s is None


def test_a_few_drains_are_no_rate() -> None:
    clock = FakeClock()
    rate = DrainRate(clock)
    rate.add(0, others_wait=True)
    for num_measured in range(1, 2 * queue_limits._MIN_MEASURED):
        drain(rate, clock, STEADY)
        expected = None if num_measured < queue_limits._MIN_MEASURED else pytest.approx(STEADY)
        assert rate.tokens_per_s == expected
