"""Requests that wait for an engine that restarts: how long they may wait, and which one is refused if they are many."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from gated_engine import Engine, options, scenario

from tercet.managers.generation import Generation, error_of
from tercet.managers.held_requests import _MIN_TIMER_S, HeldRequests
from tercet.managers.recovery import Blame
from tercet.srt.errors import MAX_RETRY_AFTER_S, FatalRequest, QueueFull, WaitingTimeout
from tercet.srt.io_struct import pack_ids

PATIENCE_S = 60


async def ends_late(sample: Generation) -> str:
    """The message of its WaitingTimeout."""
    error = error_of((await asyncio.wait_for(sample.result(), PATIENCE_S)).finish)
    assert isinstance(error, WaitingTimeout)
    return error.message


async def submit(engine: Engine, **others: Any) -> Generation:
    (sample,) = await engine.submit(1, **others)
    return sample


@pytest.mark.parametrize("own", [False, True], ids=["of the server", "of the request"])
def test_the_waiting_time_ends_during_a_restart(own: bool) -> None:
    async def work() -> None:
        engine = Engine(waiting_timeout=None if own else 0.05)
        limit = {"waiting_timeout": 0.05} if own else {}
        streams = await submit(engine, **limit)
        engine.step(3)
        waits = await submit(engine, **limit)
        engine.die(None)
        new = await submit(engine, **limit)
        for one in (waits, new):
            assert await ends_late(one) == "the request has waited for 0.05 s without a first step"
        engine.restart()
        assert engine.sent() == [streams.key], "it has begun"

    asyncio.run(work())


@scenario
async def test_requests_that_wait_for_the_end_of_the_trials_do_not_wait_longer_either(engine: Engine) -> None:
    suspect, waits = await submit(engine), await submit(engine, waiting_timeout=0.05)
    engine.die(Blame({suspect.key: 0}))
    engine.restart()
    assert engine.sent() == [suspect.key]
    await ends_late(waits)
    engine.step(4)
    assert not engine.manager.is_recovering


def with_clock(engine: Engine) -> list[float]:
    """Its only number is the time for waiting requests."""
    clock = [100.0]
    held: HeldRequests = engine.manager._held
    held._now = engine.manager.pause.now = lambda: clock[0]  # type: ignore[method-assign]
    return clock


@pytest.mark.parametrize("is_step_known", [True, False])
def test_a_suspect_reaches_its_trial_however_long_it_waits(is_step_known: bool) -> None:
    """Otherwise its client sends it again, and it kills each engine."""

    async def work() -> None:
        engine = Engine(waiting_timeout=5.0)
        clock = with_clock(engine)
        samples = [await submit(engine, text=text) for text in ("good", "poison")]
        blame = Blame({one.key: 0 for one in samples} if is_step_known else None)
        engine.die(blame)
        clock[0] += 100
        engine.manager._held._end_late()
        engine.restart()
        engine.step(4)
        assert engine.sent() == [one.key for one in samples]
        assert engine.die(blame._replace(positions={samples[1].key: 0}))
        assert isinstance(error_of((await samples[1].result()).finish), FatalRequest) and not samples[0].is_over

    asyncio.run(work())


@scenario
async def test_the_next_deadline_is_watched_when_one_has_ended(engine: Engine) -> None:
    clock, held = with_clock(engine), engine.manager._held
    samples = [await submit(engine, waiting_timeout=limit_s) for limit_s in (9.0, 5.0)]
    engine.die(None)
    assert held._timer_at == 105.0
    clock[0] += 5
    held._end_late()
    assert [one.is_over for one in samples] == [False, True] and held._timer_at == 109.0
    clock[0] += 4
    held._end_late()
    assert samples[0].is_over and held._timer is None


@scenario
async def test_the_first_deadline_of_requests_that_come_during_a_restart_is_watched(engine: Engine) -> None:
    with_clock(engine)
    engine.die(None)
    for limit_s, watched_s in ((5.0, 105.0), (9.0, 105.0), (2.0, 102.0)):
        await submit(engine, waiting_timeout=limit_s)
        assert engine.manager._held._timer_at == watched_s


@scenario
async def test_one_timer_waits_for_the_first_deadline(engine: Engine) -> None:
    """While a pause stops the clock, a deadline may stay near, and the timer must not fire all the time."""
    _, held, loop, delays_s, timers = with_clock(engine), engine.manager._held, asyncio.get_running_loop(), [], []
    call_later = loop.call_later

    def noted(delay_s: float, callback: Any, *given: Any) -> asyncio.TimerHandle:
        if callback == held._end_late:
            delays_s.append(delay_s)
        return call_later(delay_s, callback, *given)

    loop.call_later = noted  # type: ignore[method-assign, assignment]
    engine.die(None)
    for limit_s in (5.0, 2.0, 9.0, 0.001):
        await submit(engine, waiting_timeout=limit_s)
        timers.append(held._timer)
    assert delays_s == [5.0, 2.0, _MIN_TIMER_S]
    assert [timer.cancelled() for timer in timers] == [True, True, True, False] and timers[1] is timers[2]


@scenario
async def test_a_sample_that_an_engine_has_had_takes_no_place_of_new_ones(engine: Engine) -> None:
    engine.manager._held._max_num = 1
    engine.die(None)
    owner: Any = SimpleNamespace(rid="r", prompt_ids=(1, 2), on_end=print, stop=print)
    restored = Generation(owner, 0, "1")
    engine.manager.restore(restored, pack_ids([1, 2]), options(sampling_seed=1), age_s=3.0)
    samples = [await submit(engine), await submit(engine)]
    assert refused([restored, *samples]) == [False, False, True]


@scenario
async def test_the_scheduler_learns_how_long_a_request_has_waited(engine: Engine) -> None:
    clock = with_clock(engine)
    samples = [await submit(engine, waiting_timeout=60.0), await submit(engine)]
    clock[0] += 9
    engine.die(None)
    samples.append(await submit(engine, waiting_timeout=60.0))
    clock[0] += 20
    engine.restart()
    assert engine.sent() == [one.key for one in samples]
    assert [request.waited_s for request in engine.scheduler.received] == [29.0, 0.0, 20.0]


@scenario
async def test_a_request_that_had_its_first_step_does_not_wait_again(engine: Engine) -> None:
    """It has no output yet: its prompt is computed in chunks, or it is an embedding."""
    clock = with_clock(engine)
    runs, waits = [await submit(engine, waiting_timeout=60.0) for _ in range(2)]
    clock[0] += 61
    engine.die(None, begun={runs.key})
    for _ in range(2):
        engine.manager._held._end_late()
        assert not runs.is_over and waits.is_over
        engine.restart()
        assert [(one.rid, one.waited_s) for one in engine.scheduler.received] == [(runs.key, None)]
        engine.die(None)


@scenario
async def test_the_scheduler_learns_how_long_a_request_has_run(engine: Engine) -> None:
    """From its first token on, in all engines together, without the restarts. One without tokens begins anew."""
    clock = with_clock(engine)
    runs = await submit(engine)
    engine.step(2)
    prefills = await submit(engine)
    runs._submitted -= 1000  # its clock is another one: it has waited for 990 s, and has run for 10 s
    runs.first_token_s = 990.0
    clock[0] += 300
    engine.die(None, begun={prefills.key})
    clock[0] += 50  # the restart
    engine.restart()
    assert [one.resumed.ran_s for one in engine.scheduler.received] == [pytest.approx(10, abs=5), 0]
    clock[0] += 7
    engine.die(None)
    clock[0] += 50
    engine.restart()
    assert [one.resumed.ran_s for one in engine.scheduler.received] == [pytest.approx(17, abs=5), 0]


@scenario
async def test_a_pause_is_no_waiting_time(engine: Engine) -> None:
    manager = engine.manager
    await manager.pause.begin("retract")
    at = manager.pause.now()
    sample = await submit(engine, waiting_timeout=0.05)
    engine.die(None)
    await asyncio.sleep(0.15)
    assert manager.pause.now() == at and not sample.is_over
    engine.restart()
    assert [request.waited_s for request in engine.scheduler.received] == [0.0]
    await manager.pause.end()
    assert at <= manager.pause.now()


def refused(samples: list[Generation]) -> list[bool]:
    return [one.is_over for one in samples]


@pytest.mark.parametrize("low_first", [False, True])
def test_the_least_urgent_request_gives_way(low_first: bool) -> None:
    async def work() -> None:
        engine = Engine(max_queued_requests=2, schedule_low_priority_values_first=low_first)
        engine.die(None)
        samples = []
        for urgency in (1, 0, 0, 2, 1):
            samples.append(await submit(engine, priority=-urgency if low_first else urgency))
        assert refused(samples) == [False, True, True, False, True]
        assert isinstance(error_of((await samples[1].result()).finish), QueueFull)

    asyncio.run(work())


def test_the_tenant_with_the_most_places_for_its_weight_gives_way() -> None:
    async def work(places: int, tenants: str) -> str:
        """Who is held at the end."""
        engine = Engine(max_queued_requests=places, schedule_policy="dlpm", tenant_weights="b=2")
        engine.die(None)
        samples = [await submit(engine, tenant=tenant) for tenant in tenants]
        return "".join(tenant for one, tenant in zip(samples, tenants, strict=True) if not one.is_over)

    assert asyncio.run(work(4, "aaaaac")) == "aaac"
    assert asyncio.run(work(3, "aaabbbb")) == "abb", "b has twice the weight"
    assert asyncio.run(work(2, "acd")) == "ac", "nobody gives way to one that would have as much"


def test_without_shares_tenants_do_not_matter() -> None:
    async def work() -> None:
        engine = Engine(max_queued_requests=2)
        engine.die(None)
        samples = [await submit(engine, tenant=tenant) for tenant in "aab"]
        assert refused(samples) == [False, False, True]
        error = error_of((await samples[2].result()).finish)
        assert isinstance(error, QueueFull) and error.message == QueueFull.of(2, None).message

    asyncio.run(work())


@scenario
async def test_a_refusal_never_sends_a_client_away_for_longer_than_the_most(engine: Engine) -> None:
    engine.manager._held._max_num = 0
    engine.manager._held._restart_left_s = lambda: 1e6
    engine.die(None)
    error = error_of((await (await submit(engine)).result()).finish)
    assert isinstance(error, QueueFull) and error.retry_after_s == MAX_RETRY_AFTER_S


@scenario
async def test_a_new_request_does_not_look_at_all_others(engine: Engine) -> None:
    held = engine.manager._held
    held._max_num = 3

    def live() -> list[Generation]:
        raise AssertionError("all samples were looked at")

    engine.die(None)
    held._live = live
    samples = [await submit(engine) for _ in range(4)]
    assert refused(samples) == [False, False, False, True]
    samples[0].close()
    assert refused([await submit(engine), await submit(engine)]) == [False, True]
    engine.restart()
    assert not held._places and not held._waiting


@scenario
async def test_a_refusal_tells_when_the_restart_will_be_over(engine: Engine) -> None:
    manager, clock = engine.manager, [100.0]
    manager.recovery._clock = lambda: clock[0]
    manager._held._max_num = 0

    async def retry_after_s() -> int | None:
        error = error_of((await (await submit(engine)).result()).finish)
        assert isinstance(error, QueueFull)
        return error.retry_after_s

    engine.die(None)
    clock[0] += 2
    assert await retry_after_s() is None, "nobody knows how long the first restart takes"
    engine.die(None)  # the processes of the new engine died while they started
    clock[0] += 10
    engine.restart()
    clock[0] += 50
    engine.die(None)
    clock[0] += 3.5
    assert await retry_after_s() == 9
    clock[0] += 20
    assert await retry_after_s() == 1
