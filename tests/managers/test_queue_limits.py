"""The limits of the waiting queue, and the queue under overload in simulated time."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import FakeClock
from tercet.managers.queue_limits import DrainRate, QueueLimits
from tercet.managers.req import Req
from tercet.managers.tenant_shares import TenantShares
from tercet.srt.errors import MAX_RETRY_AFTER_S, QueueFull
from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.pause_messages import PauseReq

STEP_LEN = 64
"""Prompt tokens of a step, the default of Rig."""


@dataclass
class Load:
    """Requests of an open-loop load on a scheduler whose steps take simulated time."""

    rig: Rig
    returns: bool
    """Refused clients come back after Retry-After, as often as they are refused."""
    seed: int = 0
    prompt_lens: tuple[int, int] = (10, 100)
    max_new_tokens: int = 2
    refusals: dict[str, int] = field(default_factory=dict)
    """Retry-After of each refusal, by the name of the request. Each return adds "!" to the name."""

    def run(self, arrivals: list[float]) -> None:
        """`arrivals`: seconds from now, in order."""
        rig, clock = self.rig, self.rig.clock
        draw = random.Random(self.seed)
        start_s = clock.now
        due = [(start_s + at_s, f"r{number}") for number, at_s in enumerate(arrivals)]
        heapq.heapify(due)
        num_steps = 0
        while due or rig.is_busy:
            while due and due[0][0] <= clock.now:
                name = heapq.heappop(due)[1]
                length = draw.randint(*self.prompt_lens)
                rig.add(name, [draw.randrange(97) for _ in range(length)], max_new_tokens=self.max_new_tokens)
            rig.turn()
            for name, heard in list(rig.heard.items()):
                if isinstance(heard.finish, AbortFinish) and name not in self.refusals:
                    assert heard.finish.status_code == 503
                    self.refusals[name] = heard.finish.retry_after_s or 1
                    if self.returns:
                        heapq.heappush(due, (clock.now + self.refusals[name], f"{name}!"))
            steps, num_steps = rig.runner.steps[num_steps:], len(rig.runner.steps)
            clock.now += sum(0.01 + 0.001 * step.num_tokens for step in steps)
            if not steps and due:
                clock.now = max(clock.now, min(due[0][0], clock.now + 0.1))

    def waits_s(self, max_prompt_len: int = 1000) -> list[float]:
        """Queue times of the admitted requests with prompts of at most so many tokens, in the order of their ends."""
        counts = [heard.last.counts for heard in self.rig.heard.values() if heard.last is not None]
        short = [count for count in counts if count.prompt_tokens <= max_prompt_len]
        return [count.queue_time_s for count in short if count.queue_time_s is not None]

    def assert_bounded(self, limit_s: float) -> None:
        """The estimate is for the order of arrival. Prompts that fit into a step pass longer ones: these wait longer
        than estimated, and the others less."""
        assert max(self.waits_s(STEP_LEN)) < limit_s
        waits = self.waits_s()
        assert sum(waits) / len(waits) < limit_s and max(waits) < 2.25 * limit_s


def overload(num: int, per_s: float, seed: int) -> list[float]:
    draw, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(num):
        now += draw.expovariate(per_s)
        arrivals.append(now)
    return arrivals


def _rig(limit_s: float | None, **settings: object) -> Rig:
    return Rig(overlap=False, audit=False, policy="fcfs", max_queue_time_s=limit_s, **settings)


@pytest.mark.parametrize("max_running", [8, 2])
def test_under_threefold_overload_the_waits_of_admitted_requests_are_bounded(max_running: int) -> None:
    """With two rows, requests wait for rows and not for prefill: the rate includes that."""

    def run(limit_s: float | None) -> Load:
        load = Load(_rig(limit_s, max_running=max_running), returns=False)
        load.run(overload(600, 40.0, seed=1))
        return load

    unlimited = run(None)
    capacity = 600 / (unlimited.rig.clock.now - 1000.0)
    assert capacity < 40 / 2.2 and max(unlimited.waits_s()) > 10, "the load must be too much"
    limited = run(2.0)
    waits = limited.waits_s()
    limited.assert_bounded(2.0)
    assert len(limited.refusals) + len(waits) == 600 and limited.refusals
    served_per_s = len(waits) / (limited.rig.clock.now - 1000.0)
    assert served_per_s > 0.9 * capacity, "refusals must not idle the engine"


@pytest.mark.parametrize("seed", range(3))
def test_retry_after_is_enough_for_those_who_come_back(seed: int) -> None:
    """A client that comes back while new ones still come may be refused again. All others are admitted."""
    load = Load(_rig(2.0), returns=True, seed=seed)
    load.run(overload(300, 60.0, seed))
    num_returns = sum(name.endswith("!") for name in load.refusals)
    assert len(load.refusals) - num_returns > 150
    assert num_returns < 0.25 * len(load.refusals)
    assert sum(name.endswith("!!") for name in load.refusals) <= 0.05 * 300
    assert sum(name.endswith("!!!") for name in load.refusals) <= 0.01 * 300
    assert len(load.waits_s()) == 300
    load.assert_bounded(2.0)
    unlimited = Load(_rig(None), returns=False, seed=seed)
    unlimited.run(overload(300, 60.0, seed))
    # Nobody is told to come much later than necessary.
    assert load.rig.clock.now - 1000.0 < 1.3 * (unlimited.rig.clock.now - 1000.0)


def test_a_full_queue_tells_when_to_come_back() -> None:
    load = Load(_rig(None, max_queued=20), returns=True)
    load.run(overload(200, 60.0, seed=2))
    num_returns = sum(name.endswith("!") for name in load.refusals)
    assert len(load.refusals) > 60 and num_returns < 0.25 * len(load.refusals)
    assert len(load.waits_s()) == 200


def test_a_full_queue_of_many_tenants_tells_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(overlap=False, audit=False, policy="dlpm", max_queued=40, max_running=2)
    Load(rig, returns=False).run(overload(60, 60.0, seed=4))
    rig.heard.clear()
    monkeypatch.delattr(TenantShares, "num_tokens_until")
    for index in range(60):
        rig.add(f"x{index}", [index] * 30, max_new_tokens=1, tenant=f"t{index}")
    rig.run()
    told = [heard.finish.retry_after_s for heard in rig.heard.values() if isinstance(heard.finish, AbortFinish)]
    assert len(told) > 15 and all(told)


def test_nothing_is_refused_before_anything_is_measured() -> None:
    rig = _rig(0.001, max_running=1)
    for index in range(50):
        rig.add(f"r{index}", [index, 1, 2], max_new_tokens=1)
    rig.run()
    assert not any(isinstance(heard.finish, AbortFinish) for heard in rig.heard.values())


def test_an_idle_engine_refuses_nothing() -> None:
    """Even if the last wait was long: nobody waits now."""
    load = Load(_rig(0.5), returns=False)
    load.run(overload(100, 60.0, seed=3))
    assert load.refusals
    rig = load.rig
    rig.add("later", list(range(50)))
    rig.run()
    assert not isinstance(rig.heard["later"].finish, AbortFinish)


def test_the_cached_part_of_a_prompt_is_no_wait() -> None:
    """The estimate counts what must be computed, so a queue of cached prompts is short."""

    def refused(is_cached: bool) -> int:
        rig = _rig(0.5, max_running=2, pool_size=2048)
        prompt = list(range(90))
        load = Load(rig, returns=False)
        load.run(overload(60, 60.0, seed=4))  # measures the rate
        before = len(load.refusals)
        if is_cached:
            rig.add("warm", prompt, max_new_tokens=1)
            rig.run()
        for index in range(12):
            own = prompt if is_cached else [index, *prompt]
            rig.add(f"x{index}", [*own, index], max_new_tokens=1)
        rig.run()
        return sum(isinstance(heard.finish, AbortFinish) for heard in rig.heard.values()) - before

    assert refused(is_cached=True) == 0 < refused(is_cached=False)


def test_only_requests_ahead_count() -> None:
    def refused(priority: int) -> bool:
        rig = _rig(0.5, max_running=2, preemption_threshold=100)
        load = Load(rig, returns=False)
        load.run(overload(60, 60.0, seed=4))
        for index in range(9):
            rig.add(f"x{index}", [index] * 90, max_new_tokens=1)
        rig.add("urgent", [55] * 90, priority=priority)
        rig.run()
        return isinstance(rig.heard["urgent"].finish, AbortFinish)

    assert refused(0) and not refused(1)


def test_the_many_requests_of_another_tenant_are_not_all_ahead() -> None:
    def refused(policy: str, tenant: str) -> bool:
        rig = Rig(overlap=False, audit=False, policy=policy, max_queue_time_s=1.0, max_running=2)
        Load(rig, returns=False).run(overload(60, 60.0, seed=4))
        rig.heard.clear()
        for index in range(40):
            rig.add(f"x{index}", [index] * 90, max_new_tokens=1, tenant="large")
        rig.add("new", [55] * 90, tenant=tenant)
        rig.run()
        return isinstance(rig.heard["new"].finish, AbortFinish)

    assert refused("dlpm", "large") and refused("lpm", "small") and not refused("dlpm", "small")


@pytest.mark.parametrize(("policy", "is_put_off"), [("lpm", True), ("dlpm", False)])
def test_refusals_of_one_tenant_put_off_no_other(policy: str, is_put_off: bool) -> None:
    rig = Rig(overlap=False, audit=False, policy=policy, max_queue_time_s=0.5, max_running=2)
    Load(rig, returns=False).run(overload(60, 60.0, seed=4))
    for index in range(2000):
        rig.add(f"x{index}", [index % 97] * 90, max_new_tokens=1, tenant="large")
    for index in range(40):
        rig.add(f"y{index}", [index] * 90, max_new_tokens=1, tenant="small")
    rig.run()
    told = [
        heard.finish.retry_after_s
        for rid, heard in rig.heard.items()
        if rid[0] == "y" and heard.finish is not None and isinstance(heard.finish, AbortFinish)
    ]
    assert told and (max(told) == MAX_RETRY_AFTER_S) == is_put_off


def test_what_leaves_the_queue_is_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate and the queue count the same tokens, also for prefixes that the cache gets while they wait."""
    came, left = [], []
    arrive, add = QueueLimits.on_arrival, DrainRate.add

    def on_arrival(self: QueueLimits, req: Req) -> None:
        arrive(self, req)
        came.append(req.queued_tokens)

    def on_drain(self: DrainRate, num_tokens: int, *, others_wait: bool) -> None:
        add(self, num_tokens, others_wait=others_wait)
        left.append(num_tokens)

    monkeypatch.setattr(QueueLimits, "on_arrival", on_arrival)
    monkeypatch.setattr(DrainRate, "add", on_drain)
    rig = Rig(max_queue_time_s=1e9, chunked_prefill_size=16, max_prefill_tokens=32, pool_size=4096)
    for index in range(30):
        rig.add(f"r{index}", [*range(40 + index), index], max_new_tokens=2)
    rig.run()
    assert sum(left) == sum(came) > 2 * sum(rig.extend_sizes)


# The rate


@given(st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(1, 1000), st.booleans()), min_size=8, max_size=40))
@settings(deadline=None)
def test_the_rate_does_not_depend_on_pauses(drains: list[tuple[float, int, bool]]) -> None:
    """Time in which nobody waits is not measured."""

    def rate(pause_s: float) -> float | None:
        clock = FakeClock()
        measured = DrainRate(clock)
        for duration_s, num_tokens, others_wait in drains:
            clock.now += duration_s
            measured.add(num_tokens, others_wait=others_wait)
            if not others_wait:
                clock.now += pause_s
        return measured.tokens_per_s

    paused, steady = rate(0.25), rate(0.0)
    assert (paused is None) == (steady is None)
    assert steady is None or paused == pytest.approx(steady, rel=1e-6)


def test_a_steady_rate_is_measured_exactly() -> None:
    clock = FakeClock()
    rate = DrainRate(clock)
    for _ in range(5000):
        rate.add(50, others_wait=True)
        assert rate.tokens_per_s is None or rate.tokens_per_s == pytest.approx(500.0)
        clock.now += 0.1
    assert rate.tokens_per_s == pytest.approx(500.0, rel=0.02), "the time since the last drain counts, too"


def test_a_stall_lowers_the_rate_and_an_empty_queue_does_not() -> None:
    def after(stall_s: float, *, is_empty: bool) -> float:
        clock = FakeClock()
        rate = DrainRate(clock)
        for _ in range(20):
            rate.add(100, others_wait=True)
            clock.now += 1.0
        if is_empty:
            rate.stop()
        clock.now += stall_s
        assert rate.tokens_per_s is not None
        return rate.tokens_per_s

    assert after(20.0, is_empty=False) < 50.0
    assert after(20.0, is_empty=True) == pytest.approx(100.0)


def test_old_drains_are_forgotten() -> None:
    clock = FakeClock()
    rate = DrainRate(clock)
    for _ in range(20):
        rate.add(100, others_wait=True)
        clock.now += 1.0
    rate.stop()
    clock.now += 3600.0
    assert rate.tokens_per_s is None


def test_retry_after_is_bounded() -> None:
    load = Load(_rig(1.0), returns=False)
    load.run(overload(1500, 300.0, seed=5))
    told = load.refusals.values()
    assert max(told) == MAX_RETRY_AFTER_S and min(told) >= 1


def test_requests_with_a_row_need_no_place_in_the_queue() -> None:
    rig = Rig(max_queued=1, max_running=8)
    for index in range(8):
        rig.add(f"r{index}", [index] * 5)
    rig.run()
    assert all(isinstance(heard.finish, LengthFinish) for heard in rig.heard.values())


def test_requests_without_memory_need_places_though_there_are_rows() -> None:
    rig = Rig(max_queued=1, max_running=8, pool_size=64)
    rig.add("large", [1] * 60, max_new_tokens=4)
    rig.turn()
    rig.add("waits", [2] * 60, max_new_tokens=2)
    rig.turn()
    rig.add("refused", [3] * 60, max_new_tokens=2)
    rig.run()
    assert isinstance(rig.heard["waits"].finish, LengthFinish)
    assert rig.heard["refused"].finish.err_type == QueueFull.__name__


def test_a_pause_starts_no_requests_so_all_need_places() -> None:
    rig = Rig(max_queued=2)
    rig.inbox.messages.append(PauseReq(1, False))
    rig.turn()
    for index in range(3):
        rig.add(f"r{index}", [index] * 5)
    rig.turn()
    assert rig.heard["r2"].finish.err_type == QueueFull.__name__


def test_a_full_queue_refuses() -> None:
    rig = Rig(max_queued=2, max_running=1)
    rig.add("running", [9] * 5)
    rig.turn()
    for index in range(5):
        rig.add(f"r{index}", [index] * 5)
    rig.run()
    refused = [rid for rid, heard in rig.heard.items() if isinstance(heard.finish, AbortFinish)]
    assert len(refused) == 3
    assert all(rig.heard[rid].finish.err_type == QueueFull.__name__ for rid in refused)
    assert all(rig.heard[rid].finish.status_code == 503 for rid in refused)
