"""A pause as clients see it: endpoints, probes, loads, and a restart of the engine in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_http import FakeScheduler, Site, error_of, make_manager
from gated_engine import Engine
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeClock
from tercet.managers import pause_control
from tercet.managers.pause_control import PauseControl, PauseMode
from tercet.managers.recovery import Blame
from tercet.srt.errors import EngineRestarting
from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.pause_messages import ContinueReq, PauseReq
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

OPTIONS = RequestOptions(sampling=SamplingParams(max_new_tokens=8), stream=True)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


@pytest.mark.parametrize(
    ("body", "mode", "retract"),
    [
        (b"", "abort", False),
        (b"{}", "abort", False),
        (b'{"mode": "retract"}', "retract", True),
        (b'{"mode": "in_place"}', "in_place", False),
    ],
)
def test_what_sglangs_clients_send(site: Site, body: bytes, mode: str, retract: bool) -> None:
    answer = site.post("/pause_generation", body)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok") and mode in answer.json()["message"]
    (message,) = site.scheduler.pauses
    assert isinstance(message, PauseReq) and message.retract == retract
    assert site.post("/continue_generation", b"{}" if body else b"").json()["status"] == "ok"
    assert isinstance(site.scheduler.pauses[-1], ContinueReq)
    assert site.post("/continue_generation", {"torch_empty_cache": True}).status_code == 200


def test_an_unknown_mode_is_refused(site: Site) -> None:
    assert site.refused("/pause_generation", {"mode": "sleep"})["param"] == "mode"
    assert site.scheduler.pauses == []


def test_probes_and_loads_tell_of_a_pause(site: Site) -> None:
    site.post("/pause_generation", {"mode": "in_place"})
    assert site.get("/health").json() == {"status": "paused"}
    for path in ("/ready", "/health_generate"):
        answer = site.get(path)
        assert answer.status_code == 503 and error_of(answer)["code"] == "engine_paused"
    assert site.get("/server_info").json()["status"] == "paused"
    assert "is_paused" in site.get("/server_info").json()["internal_states"][0]
    assert "is_paused" in site.get("/v1/loads").json()["loads"][0]
    site.post("/continue_generation", {})
    assert site.get("/health").json() == {"status": "ok"}
    assert site.get("/ready").status_code == 200
    assert site.get("/server_info").json()["status"] == "ready"


@pytest.mark.parametrize(("mode", "is_aborted"), [("abort", True), ("retract", False), ("in_place", False)])
def test_only_abort_ends_the_requests(mode: Any, is_aborted: bool) -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        (generation,) = await manager.submit("hi", OPTIONS)
        await manager.pause.begin(mode)
        await asyncio.sleep(0)
        assert generation.is_over == is_aborted
        if is_aborted:
            finish = (await generation.result()).finish
            assert isinstance(finish, AbortFinish) and finish.status_code is None
        generation.close()

    asyncio.run(work())


def test_a_restarted_engine_is_paused_before_it_gets_requests() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler())
        await manager.pause.begin("in_place")
        manager.on_death(None)
        with pytest.raises(EngineRestarting):
            await manager.pause.end()
        (generation,) = await manager.submit("hi", OPTIONS)
        second = FakeScheduler()
        second.manager = manager
        sent: list[Any] = []
        send = second.send
        second.send = lambda message: (sent.append(message), send(message))[1]  # type: ignore[method-assign]
        manager.resume(second, manager.facts)
        assert isinstance(sent[0], PauseReq) and not sent[0].retract and len(sent) == 2
        await manager.pause.end()
        assert not manager.pause.is_on and manager.stall is None
        assert (await generation.result()).finish == LengthFinish(8)

    asyncio.run(work())


def test_a_pause_that_the_engine_does_not_survive_is_no_pause() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.dead = True
        manager = make_manager(scheduler)
        pausing = asyncio.create_task(manager.pause.begin("in_place"))
        await asyncio.sleep(0)
        manager.on_death(None)
        with pytest.raises(EngineRestarting):
            await pausing
        assert not manager.pause.is_on

    asyncio.run(work())


def test_the_control_is_the_managers() -> None:
    async def work() -> None:
        assert isinstance(make_manager(FakeScheduler()).pause, PauseControl)

    asyncio.run(work())


def test_streams_are_told_of_the_pause_once_the_engine_runs_again() -> None:
    """The trial of a suspect waits for the end of the pause."""

    async def work() -> None:
        engine = Engine()
        await engine.submit(1)
        engine.step(2)
        await engine.manager.pause.begin("in_place")
        engine.die(Blame(None))
        assert engine.manager.stall == "restarting"
        engine.restart()
        assert engine.manager.is_recovering and engine.manager.stall == "paused"
        await engine.manager.pause.end()
        assert engine.manager.stall == "restarting"
        engine.step(3)
        assert engine.manager.stall is None
        engine.manager.fail("gone")
        assert engine.manager.stall is None

    asyncio.run(work())


def test_streams_are_told_of_a_pause_when_it_has_begun() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler())
        told: list[str | None] = []
        manager.on_stall.add(lambda: told.append(manager.stall))
        await manager.pause.begin("in_place")
        assert told == ["paused"]

    asyncio.run(work())


@given(st.lists(st.sampled_from(["in_place", "retract", "end", "a second"]), max_size=12))
def test_the_time_of_waiting_requests_stands_still_only_during_a_pause(events: list[str]) -> None:
    async def work(clock: FakeClock) -> None:
        pause, seconds = make_manager(FakeScheduler()).pause, 0
        start, is_on = pause.now(), False
        for event in events:
            if event == "a second":
                clock.now += 1
                seconds += not is_on
            elif event == "end":
                await pause.end()
                is_on = False
            else:
                await pause.begin(cast(PauseMode, event))
                is_on = True
            assert pause.now() - start == seconds

    clock = FakeClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pause_control, "time", SimpleNamespace(monotonic=clock))
        asyncio.run(work(clock))


@pytest.mark.parametrize("ends", [False, True])
def test_a_pause_is_known_though_its_caller_is_gone(ends: bool) -> None:
    """The HTTP worker that has forwarded the call dies before the step ends."""

    async def work() -> None:
        manager = make_manager(FakeScheduler())
        if ends:
            await manager.pause.begin("in_place")
        call = asyncio.create_task(manager.pause.end() if ends else manager.pause.begin("in_place"))
        for _ in range(2):
            await asyncio.sleep(0)
        assert manager.pause.is_on == ends
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(3):
            await asyncio.sleep(0)
        assert manager.pause.is_on != ends and manager.stall == (None if ends else "paused")

    asyncio.run(work())
