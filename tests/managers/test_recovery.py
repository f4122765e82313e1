"""Which samples of a dead engine are sent again, in which order, and which one is to blame."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from fake_http import text_of
from gated_engine import Engine, scenario
from hypothesis import given
from hypothesis import strategies as st

from tercet.managers.generation import Generation, error_of
from tercet.managers.recovery import Blame, Recovery
from tercet.srt.errors import EngineDead, EngineRestarting, FatalRequest, QueueFull
from tercet.srt.io_struct import AbortFinish, BatchTextOut, Counts, FlushCacheReply, LengthFinish, TextOut, TokenOut


@scenario
async def test_after_a_fault_from_outside_all_samples_go_on_at_once(engine: Engine) -> None:
    samples = await engine.submit(3)
    engine.step(5)
    late = await engine.submit(1)
    for num_deaths in range(1, 4):
        engine.die(None)
        engine.restart()
        in_order = [*samples, *late] if num_deaths == 1 else [*late, *samples]  # at first, the last one has no output
        assert engine.sent() == [one.key for one in in_order]
        engine.step(2)
        assert [one.num_recoveries for one in samples] == [num_deaths] * 3
    resumed = [request.resumed for request in engine.scheduler.received]
    assert [one.output_ids for one in resumed if one] == [list(range(4))] + [list(range(9))] * 3
    assert resumed[1] is not None and (resumed[1].cached_tokens, resumed[1].num_retractions) == (1, 0)
    engine.step(40)
    for one in [*samples, *late]:
        out = await one.result()
        assert (out.text, out.token_ids, out.finish) == (text_of(40), list(range(40)), LengthFinish(40))
    assert engine.manager.recovery.num_resumed == 12 and engine.manager.recovery.num_restarts == 3


@scenario
async def test_a_sample_without_an_output_counts_its_cached_prompt_again(engine: Engine) -> None:
    await engine.submit(1)
    engine.die(None)
    engine.restart()
    (request,) = engine.scheduler.received
    assert request.resumed is not None and request.resumed.cached_tokens is None


@scenario
async def test_the_shortest_streams_go_on_first_and_those_that_have_not_begun_last(engine: Engine) -> None:
    """So the median stream waits for few tokens. Those that have not begun keep their order."""
    waits = await engine.submit(1)
    engine.scheduler.held.clear()
    samples = []
    for num_steps in (5, 3, 2):
        samples += await engine.submit(1)
        engine.step(num_steps)
    waits += await engine.submit(1)
    engine.die(None)
    engine.restart()
    assert engine.sent() == [one.key for one in [*reversed(samples), *waits]]


@scenario
async def test_suspects_go_on_one_after_the_other_and_others_at_once(engine: Engine) -> None:
    samples = await engine.submit(4)
    engine.step(3)
    first, second, third, fourth = (one.key for one in samples)
    engine.die(Blame({second: 3, third: 8}))
    engine.restart()
    assert engine.sent() == [first, fourth, second]
    assert engine.manager.is_recovering
    engine.step(2)
    assert third not in engine.sent()
    engine.step(1)  # 3 tokens before the fatal step, one of it, two more
    assert engine.sent()[3:] == [third]
    engine.step(7)
    assert engine.manager.is_recovering
    engine.step(1)
    assert not engine.manager.is_recovering


@scenario
async def test_the_culprit_ends_at_the_second_death_and_its_neighbours_go_on(engine: Engine) -> None:
    samples = await engine.submit_different(8)
    engine.step(3)
    culprit = samples[5]
    engine.die(Blame({one.key: 3 for one in samples}))
    for _ in range(100):
        if engine.manager.is_restarting:
            engine.restart()
        if culprit.key in engine.scheduler.running:
            engine.die(Blame({key: len(one.output_ids) for one in samples if (key := one.key) in engine.sent()}))
        else:
            engine.step(1)
    out = await culprit.result()
    assert isinstance(error_of(out.finish), FatalRequest) and out.token_ids == [0, 1, 2]
    assert engine.manager.recovery.num_fatal == 1 and engine.manager.recovery.num_restarts == 2
    for one in samples:
        if one is not culprit:
            assert (await one.result()).text == text_of(40)


@scenario
async def test_new_requests_wait_until_the_trials_are_over(engine: Engine) -> None:
    samples = await engine.submit(2)
    engine.step(3)
    (queued,) = await engine.submit(1)
    engine.die(Blame({samples[1].key: 3}))
    engine.restart()
    (late,) = await engine.submit(1)
    assert engine.sent() == [samples[0].key, samples[1].key]
    engine.step(2)
    assert engine.sent()[2:] == [] and engine.manager.is_recovering
    engine.step(1)
    assert engine.sent()[2:] == [queued.key, late.key] and not engine.manager.is_recovering
    engine.step(40)
    for one in (*samples, queued, late):
        assert (await one.result()).text == text_of(40)


@scenario
async def test_a_request_that_equals_a_culprit_is_refused_for_a_while(engine: Engine) -> None:
    """Clients send a request again after an error, and it would kill the engine again."""
    (culprit,) = await engine.submit(1, temperature=0.5)
    for _ in range(2):
        engine.die(Blame({culprit.key: 0}))
        engine.restart()
    assert isinstance(error_of((await culprit.result()).finish), FatalRequest)
    (again,) = await engine.submit(1, temperature=0.5)  # with another seed
    error = error_of((await again.result()).finish)
    assert isinstance(error, FatalRequest) and "600 s" in error.message and engine.sent() == []
    (other,) = await engine.submit(1, temperature=0.6)
    engine.manager.recovery._clock = lambda: time.monotonic() + 601
    (late,) = await engine.submit(1, temperature=0.5)
    assert engine.sent() == [other.key, late.key]


@scenario
async def test_an_unknown_step_convicts_nobody_if_others_ran_beside_the_trial(engine: Engine) -> None:
    samples = await engine.submit(3)
    engine.step(3)
    engine.die(Blame({samples[0].key: 3}))
    engine.restart()
    assert engine.sent() == [one.key for one in [*samples[1:], samples[0]]]
    engine.die(Blame(None))
    engine.restart()
    assert not any(one.is_over for one in samples) and engine.sent() == [samples[0].key]


@scenario
async def test_without_a_known_step_every_sample_is_a_suspect(engine: Engine) -> None:
    samples = await engine.submit_different(3)
    engine.die(Blame(None))
    engine.restart()
    assert engine.sent() == [samples[0].key]
    engine.die(Blame(None))
    assert isinstance(error_of((await samples[0].result()).finish), FatalRequest)
    engine.restart()
    assert engine.sent() == [samples[1].key]


@scenario
async def test_a_lone_sample_is_to_blame_for_its_second_fatal_step(engine: Engine) -> None:
    (sample,) = await engine.submit(1)
    engine.die(Blame({sample.key: 0}))
    engine.restart()
    engine.step(10)
    assert not engine.manager.is_recovering
    engine.die(None)
    engine.restart()
    assert not sample.is_over
    engine.die(Blame({sample.key: 10}))
    assert isinstance(error_of((await sample.result()).finish), FatalRequest)


@scenario
async def test_a_death_from_outside_during_a_trial_convicts_nobody(engine: Engine) -> None:
    samples = await engine.submit(2)
    engine.die(Blame({one.key: 0 for one in samples}))
    for _ in range(3):
        engine.restart()
        assert engine.sent() == [samples[0].key]
        engine.die(None)
    engine.restart()
    engine.step(3)
    assert engine.sent() == [one.key for one in samples]
    engine.step(40)
    assert [(await one.result()).text for one in samples] == [text_of(40)] * 2


@scenario
async def test_the_trial_goes_on_when_a_client_leaves(engine: Engine) -> None:
    samples = await engine.submit(3)
    engine.die(Blame({one.key: 0 for one in samples}))
    samples[1].close()
    engine.restart()
    samples[0].close()
    engine.manager.on_message(BatchTextOut([]))
    assert engine.sent() == [samples[0].key, samples[2].key]


@scenario
async def test_aborts_during_a_restart_end_with_the_tokens_so_far(engine: Engine) -> None:
    before, during, closed = await engine.submit(3)
    engine.step(4)
    engine.scheduler.dead = True
    before.abort()  # the engine dies before it answers
    engine.manager.on_death(None)
    during.abort()
    closed.close()
    assert before.is_over and during.is_over and closed.is_over
    for one in (before, during, closed):
        out = await one.result()
        assert out.finish == AbortFinish("aborted by the client")
        assert (out.text, out.counts.completion_tokens) == (text_of(4), 4)
    engine.restart()
    assert engine.sent() == [] and engine.manager.num_unfinished == 0


@scenario
async def test_new_requests_wait_for_the_engine(engine: Engine) -> None:
    engine.die(None)
    (sample,) = await engine.submit(1)
    with pytest.raises(EngineRestarting):
        await engine.manager.flush_cache()
    assert not engine.manager.is_healthy and engine.manager.is_restarting
    engine.die(None)  # the new engine has died while it started
    engine.restart()
    (request,) = engine.scheduler.received
    assert request.rid == sample.key and request.resumed is None
    engine.step(40)
    assert (await sample.result()).text == text_of(40) and sample.num_recoveries == 0


def test_waiting_for_the_engine_is_bounded() -> None:
    async def work() -> None:
        engine = Engine(max_queued_requests=2)
        running = await engine.submit(3)
        engine.die(None)
        samples = await engine.submit(3)
        assert isinstance(error_of((await samples[2].result()).finish), QueueFull)
        samples[0].close()  # a client that leaves makes room for another
        samples += await engine.submit(2)
        assert [one.is_over for one in samples] == [True, False, True, False, True]
        engine.restart()
        assert engine.sent() == [one.key for one in [*running, samples[1], samples[3]]]

    asyncio.run(work())


@scenario
async def test_calls_in_flight_fail_by_name_and_the_last_state_is_told(engine: Engine) -> None:
    manager = engine.manager
    assert (await manager.scheduler_state(1)).age_s == 0
    engine.scheduler.dead = True
    flush = asyncio.ensure_future(manager.flush_cache())
    state = asyncio.ensure_future(manager.scheduler_state(5))
    await asyncio.sleep(0)
    manager.on_death(None)
    with pytest.raises(EngineRestarting):
        await flush
    assert (await state).state == (await manager.scheduler_state(5)).state


@scenario
async def test_a_call_that_is_given_up_as_the_engine_dies_does_not_stop_the_restart(engine: Engine) -> None:
    engine.scheduler.dead = True
    call = asyncio.create_task(engine.manager.flush_cache())
    await asyncio.sleep(0)
    call.cancel()  # what it waits for is over now, and the task ends in the next turn of the loop
    engine.manager.on_message(FlushCacheReply(1, 0))
    engine.die(None)
    engine.restart()
    with pytest.raises(asyncio.CancelledError):
        await call


@scenario
async def test_the_last_state_of_an_engine_that_hangs_is_not_told(engine: Engine) -> None:
    await engine.manager.scheduler_state(60.0)
    engine.scheduler.dead = True
    assert (await engine.manager.scheduler_state(0.001)).age_s > 0
    engine.manager.heartbeats._scheduler -= engine.manager.server_args.watchdog_timeout
    with pytest.raises(EngineDead, match="did not answer"):
        await engine.manager.scheduler_state(0.001)


@scenario
async def test_when_the_engine_is_given_up_every_sample_ends(engine: Engine) -> None:
    samples = await engine.submit(3)
    engine.die(Blame({samples[0].key: 0, samples[1].key: 0}))
    engine.restart()
    engine.die(None)
    engine.manager.fail("it cannot be started")
    for one in samples:
        assert isinstance(error_of((await one.result()).finish), EngineDead)
    assert engine.manager.num_unfinished == 0 and not engine.manager.is_restarting


class Owner:
    rid = "r"
    prompt_ids: Sequence[int] = (1,)

    def stop(self, generation: Generation) -> None: ...

    def held_text(self, generation: Generation) -> str:
        return ""

    def on_end(self, generation: Generation) -> None: ...


@given(
    st.sets(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(1, 8),
    st.lists(st.sampled_from(["step", "kill", "new"]), max_size=30),
)
def test_only_poisonous_requests_are_convicted(poisons: set[int], num: int, events: list[str]) -> None:
    """They kill every step that they are in, whatever else happens. Each one ends at the second death that it has
    caused at the latest, and all others survive."""
    recovery = Recovery(600)
    samples: list[Generation] = []
    engine: dict[str, Generation] = {}
    deaths = dict.fromkeys(map(str, poisons), 0)

    def send_held() -> None:
        for one in recovery.take_innocent([one for one in samples if not one.is_over and one.key not in engine]):
            engine[one.key] = one

    def try_next() -> None:
        if recovery.is_isolating:
            one = recovery.next_trial()
            if one is not None:
                engine[one.key] = one
            elif not recovery.is_isolating:
                send_held()

    def death(blame: Blame | None) -> None:
        lost = list(engine.values())
        engine.clear()
        recovery.on_death(lost, blame, ())
        send_held()
        try_next()

    def step() -> None:
        for one in list(engine.values()):
            if one.key in deaths:
                deaths[one.key] += 1
                return death(Blame({one.key: len(one.output_ids) for one in engine.values()}))
        for one in engine.values():
            one.push(TextOut(tokens=TokenOut(rid=one.key, token_ids=[0], finish=None, counts=Counts(1)), text=""))
        try_next()

    for event in [*["new"] * num, *events, *["step"] * 200]:
        if event == "new":
            samples.append(Generation(Owner(), 0, str(len(samples))))
            if not recovery.is_isolating:
                engine[samples[-1].key] = samples[-1]
        elif event == "kill":
            death(None)
        else:
            step()
    assert {one.key for one in samples if one.is_over} == set(deaths) & {one.key for one in samples}
    assert all(num_deaths <= 2 for num_deaths in deaths.values())
    assert {one.key for one in samples if not one.is_over} == set(engine)
