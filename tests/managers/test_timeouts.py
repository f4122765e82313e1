"""Waiting and running timeouts: exact, in any order of deadlines, and never a scan of all requests."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import FakeClock, expected_output
from tercet.managers import timeouts
from tercet.managers.req import Req, Stage
from tercet.managers.timeouts import Timeouts
from tercet.srt.errors import InvalidRequest
from tercet.srt.io_struct import AbortFinish, LengthFinish, Resumed
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

LIMITS = st.sampled_from([None, 1.0, 2.5, 7.0, 30.0])


def make_req(arrival: int, **limits: float | None) -> Req:
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=4, sampling_seed=1), **limits)
    return Req(f"r{arrival}", [1, 2], options, arrival=arrival)


def turns(rig: Rig, count: int, step_s: float = 1.0) -> None:
    for _ in range(count):
        rig.turn()
        rig.clock.now += step_s


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["of the server", "of the request"])
def test_a_request_that_waits_too_long_gets_503(overlap: bool, own: bool) -> None:
    rig = Rig(max_running=1, overlap=overlap, waiting_timeout=None if own else 5.0)
    rig.add("runs", [1] * 9, max_new_tokens=20)
    rig.turn()
    rig.add("waits", [2] * 9, **({"waiting_timeout": 5.0} if own else {}))
    turns(rig, 5)
    assert rig.heard["waits"].finish is None
    turns(rig, 2)
    finish = rig.heard["waits"].finish
    assert isinstance(finish, AbortFinish) and (finish.status_code, finish.err_type) == (503, "WaitingTimeout")
    assert "waited for 5 s" in finish.message
    rig.run()
    assert rig.heard["runs"].ids == expected_output([1] * 9, 1, 20, 97)


def test_the_time_before_the_scheduler_counts() -> None:
    rig = Rig(max_running=1, waiting_timeout=10.0)
    rig.add("runs", [1] * 9, max_new_tokens=20)
    rig.turn()
    rig.add("held", [2] * 9, waited_s=9.0)
    rig.add("late", [3] * 9, waited_s=11.0)
    turns(rig, 1)
    assert rig.heard["held"].finish is None
    turns(rig, 2)
    for rid in ("held", "late"):
        finish = rig.heard[rid].finish
        assert isinstance(finish, AbortFinish) and finish.err_type == "WaitingTimeout"
    rig.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_runs_too_long_ends_with_what_it_has(overlap: bool) -> None:
    rig = Rig(overlap=overlap, waiting_timeout=3.0, running_timeout=10.0)
    rig.add("long", [1] * 9, max_new_tokens=100, stream=False)
    rig.add("short", [2] * 9, max_new_tokens=5)
    turns(rig, 20)
    heard = rig.heard["long"]
    assert isinstance(heard.finish, AbortFinish) and heard.finish.status_code is None
    assert "run for 10 s" in heard.finish.message
    assert 8 <= len(heard.ids) <= 11
    assert heard.ids == expected_output([1] * 9, 1, 100, 97)[: len(heard.ids)]
    assert rig.heard["short"].finish == LengthFinish(5)
    assert rig.kv.num_used == 0 and not rig.is_busy


def test_retracted_requests_have_no_second_waiting_time() -> None:
    rig = Rig(max_running=1, preemption_threshold=0, overlap=False, waiting_timeout=3.0)
    rig.add("low", [1] * 9, max_new_tokens=10)
    turns(rig, 2, step_s=0.0)
    rig.add("high", [2] * 9, priority=5, max_new_tokens=8)
    turns(rig, 30)
    assert rig.heard["low"].last.counts.num_retractions == 1
    assert rig.heard["low"].ids == expected_output([1] * 9, 1, 10, 97)


def test_the_shorter_limit_holds_and_none_is_the_servers() -> None:
    clock = FakeClock()
    found = Timeouts(5.0, None, clock)
    for arrival, limit in enumerate([None, 2.0, 9.0]):
        found.on_arrival(make_req(arrival, waiting_timeout=limit))
    clock.now += 2.0
    assert [req.rid for req, _ in found.take_late()] == ["r1"]
    clock.now += 3.0
    assert [req.rid for req, _ in found.take_late()] == ["r0", "r2"]
    assert not found.is_armed


def test_a_request_is_late_once_if_both_of_its_limits_end_at_the_same_time() -> None:
    clock = FakeClock()
    found = Timeouts(2.0, 1.0, clock)
    req = make_req(0)
    found.on_arrival(req)
    clock.now += 1.0
    found.on_launch([req])
    clock.now += 1.0
    assert [late.rid for late, _ in found.take_late()] == ["r0"]
    assert not found.is_armed


def test_the_time_stands_still_during_a_pause() -> None:
    clock = FakeClock()
    found = Timeouts(5.0, 5.0, clock)
    found.on_arrival(make_req(0))
    clock.now += 4.0
    found.pause()
    clock.now += 1000.0
    found.pause()
    found.on_arrival(make_req(1))
    assert found.take_late() == []
    found.resume()
    found.resume()
    clock.now += 1.0
    assert [req.rid for req, _ in found.take_late()] == ["r0"]
    clock.now += 4.0
    assert [req.rid for req, _ in found.take_late()] == ["r1"]


def test_a_request_of_an_engine_that_died_does_not_wait_again() -> None:
    clock = FakeClock()
    found = Timeouts(2.0, 5.0, clock)
    req = make_req(0)
    found.on_arrival(req, None)
    clock.now += 4.0
    assert found.take_late() == []
    found.on_launch([req])  # it runs since its arrival
    clock.now += 1.0
    assert [late.rid for late, _ in found.take_late()] == ["r0"]


def test_the_running_time_of_a_resumed_request_goes_on_while_it_waits() -> None:
    """As that of a retracted one does."""
    rig = Rig(running_timeout=5.0, max_running=1, overlap=False)
    known = expected_output([1] * 9, 1, 4, 97)
    rig.add("first", [2] * 9, max_new_tokens=100, priority=1)
    turns(rig, 2, step_s=0.0)
    rig.add("r", [1] * 9, max_new_tokens=100, resumed=Resumed(known, 0, 0, ran_s=4.0), waited_s=None)
    rig.turn()
    rig.clock.now += 1.0
    rig.turn()
    assert rig.heard["first"].finish is None
    finish = rig.heard["r"].finish
    assert isinstance(finish, AbortFinish) and "run for 5 s" in finish.message


@pytest.mark.parametrize(("ran_s", "left_s"), [(0.0, 5.0), (3.0, 2.0), (9.0, 0.0)])
def test_the_running_time_goes_on_in_the_next_engine(ran_s: float, left_s: float) -> None:
    rig = Rig(running_timeout=5.0, overlap=False)
    known = expected_output([1] * 9, 1, 4, 97)
    rig.add("r", [1] * 9, max_new_tokens=100, resumed=Resumed(known, 0, 0, ran_s=ran_s), waited_s=None)
    rig.turn()
    start = rig.clock.now
    while rig.heard["r"].finish is None:
        rig.clock.now += 0.5
        rig.turn()
    assert left_s <= rig.clock.now - start <= left_s + 1.0
    finish = rig.heard["r"].finish
    assert isinstance(finish, AbortFinish) and finish.status_code is None and "run for 5 s" in finish.message


def test_ended_requests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "_HEAP_SLACK", 4)
    found = Timeouts(5.0, 5.0, FakeClock())
    for arrival in range(500):
        req = make_req(arrival)
        found.on_arrival(req)
        found.on_launch([req])
        req.stage = Stage.FINISHED
    assert len(found._heap) < 80


def test_live_requests_are_sorted_anew_only_when_they_have_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    num_sorted, heapify = 0, timeouts.heapq.heapify

    def counted(heap: list) -> None:
        nonlocal num_sorted
        num_sorted += 1
        heapify(heap)

    monkeypatch.setattr(timeouts.heapq, "heapify", counted)
    found = Timeouts(5.0, None, FakeClock())
    for arrival in range(2000):
        found.on_arrival(make_req(arrival))
    assert len(found._heap) == 2000 and num_sorted <= 6


def test_without_a_limit_there_is_no_deadline() -> None:
    found = Timeouts(None, None, FakeClock())
    req = make_req(0)
    found.on_arrival(req)
    found.on_launch([req])
    assert not found.is_armed


EVENTS = st.tuples(st.sampled_from(["arrival", "arrival", "launch", "end", "clock"]), st.integers(0, 9))


@given(st.lists(EVENTS, max_size=30))
@example([("arrival", 1), ("arrival", 4), ("arrival", 2), ("end", 0), ("arrival", 8), ("clock", 3)])
def test_late_requests_are_found_in_the_order_of_their_deadlines(events: list[tuple[str, int]]) -> None:
    """A request is launched again for each chunk, and after a retraction. Only the first launch gives it a deadline."""
    clock, deadlines = FakeClock(), dict[Req, float]()
    found = Timeouts(None, None, clock)
    for arrival, (event, number) in enumerate(events):
        found._max_len = 0  # the next deadline removes all void entries
        live = sorted(deadlines, key=lambda req: req.arrival)
        if event == "arrival":
            req = make_req(arrival, waiting_timeout=number + 1.0, running_timeout=9.5 - number)
            found.on_arrival(req)
            deadlines[req] = clock.now + number + 1.0
        elif event == "clock":
            clock.now += number
            late = sorted((at, req.arrival) for req, at in deadlines.items() if at <= clock.now)
            ended = [req for req, _ in found.take_late()] if found.is_armed else []
            assert [(deadlines.pop(req), req.arrival) for req in ended] == late
        elif live:
            req = live[number % len(live)]
            found.on_launch([req])
            if event == "end":
                req.stage = Stage.FINISHED
                del deadlines[req]
            elif req.queue_time_s is None:
                limit_s = req.options.running_timeout
                assert limit_s is not None
                deadlines[req], req.queue_time_s = clock.now + limit_s, 0.0


@given(
    limits=st.tuples(LIMITS, LIMITS),
    requests=st.lists(st.tuples(st.integers(0, 12), LIMITS, LIMITS, st.integers(1, 25)), min_size=1, max_size=12),
    steps=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=6),
    overlap=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_each_request_ends_in_time_and_only_the_late_ones_early(
    limits: tuple[float | None, float | None], requests: list, steps: list[float], overlap: bool
) -> None:
    rig = Rig(max_running=2, pool_size=80, overlap=overlap, waiting_timeout=limits[0], running_timeout=limits[1])
    arrivals: dict[str, float] = {}
    ends: dict[str, float] = {}
    turn = 0
    while len(ends) < len(requests):
        assert turn < 3000
        for index, (at, waiting, running, length) in enumerate(requests):
            if at == turn:
                own = {"waiting_timeout": waiting, "running_timeout": running}
                rig.add(f"r{index}", [index] * 5, max_new_tokens=length, **own)
                arrivals[f"r{index}"] = rig.clock.now
        rig.turn()
        for rid, heard in rig.heard.items():
            if heard.finish is not None:
                ends.setdefault(rid, rig.clock.now)
        rig.clock.now += steps[turn % len(steps)]
        turn += 1
    for index, (_, waiting, running, length) in enumerate(requests):
        heard = rig.heard[f"r{index}"]
        counts = heard.last.counts
        wait_limit = min((one for one in (limits[0], waiting) if one is not None), default=None)
        run_limit = min((one for one in (limits[1], running) if one is not None), default=None)
        full = expected_output([index] * 5, 1, length, 97)
        assert heard.ids == full[: len(heard.ids)]
        lived = ends[f"r{index}"] - arrivals[f"r{index}"]
        if isinstance(heard.finish, LengthFinish):
            assert heard.ids == full
        elif heard.finish.status_code == 503:
            assert wait_limit is not None and counts.queue_time_s is None and lived >= wait_limit and not heard.ids
        else:
            assert run_limit is not None and lived - counts.queue_time_s >= run_limit
        # A turn may notice it one clock step late, and one more while a step is in flight.
        if wait_limit is not None and counts.queue_time_s is not None:
            assert counts.queue_time_s < wait_limit
        if run_limit is not None and counts.queue_time_s is not None:
            assert lived - counts.queue_time_s <= run_limit + 2 * max(steps)


@pytest.mark.parametrize("name", ["waiting_timeout", "running_timeout"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_limit_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be a positive number of seconds") as error:
        make_req(0, **{name: value})
    assert error.value.param == name
