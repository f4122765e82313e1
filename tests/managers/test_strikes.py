"""A suspicion outlives its request: a client that goes away and comes again does not kill the engine without end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_http import text_of
from gated_engine import Engine, options, scenario

from tercet.managers import recovery, strikes
from tercet.managers.generation import Generation, error_of
from tercet.managers.recovery import TRIALS_S, Blame
from tercet.managers.strikes import Strikes
from tercet.srt.errors import FatalRequest, WaitingTimeout
from tercet.srt.io_struct import AbortFinish, BatchTextOut, BrokenMessage, Counts, GenerateReq, TextOut, TokenOut

LEAVES: list[Callable[[Generation], None]] = [Generation.close, Generation.abort]


async def one(engine: Engine, text: str) -> Generation:
    (sample,) = await engine.submit(1, text)
    return sample


async def is_fatal(sample: Generation) -> bool:
    return isinstance(error_of((await asyncio.wait_for(sample.result(), 0.5)).finish), FatalRequest)


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("when", ["before the first death", "before its trial", "during its trial"])
def test_a_client_that_goes_away_does_not_take_the_suspicion_along(
    leave: Callable[[Generation], None], when: str
) -> None:
    """It kills the engine twice, with as many requests as it likes. Then its requests are refused."""

    async def work() -> None:
        engine = Engine()
        engine.scheduler.dead = True  # it hangs, so it does not tell the end of the sample
        neighbours = [await one(engine, "good"), await one(engine, "fine")]
        poison = await one(engine, "poison")
        if when == "before the first death":
            leave(poison)
        assert not engine.die(Blame({key.key: 0 for key in [*neighbours, poison]}))
        if when == "before its trial":
            leave(poison)
        engine.restart()
        engine.step(6)
        if when == "during its trial":
            assert poison.key in engine.sent()
            engine.scheduler.dead = True
            leave(poison)
            assert engine.die(Blame({poison.key: 0}))
        else:
            assert poison.key not in engine.sent() and not engine.manager.is_recovering
            again = await one(engine, "poison")
            new = await one(engine, "new")
            assert engine.sent()[-1] == again.key and engine.manager.is_recovering, "new ones wait for its trial"
            engine.scheduler.dead = True
            leave(again)
            assert engine.die(Blame({again.key: 0}))
            neighbours.append(new)
        engine.restart()
        assert await is_fatal(await one(engine, "poison"))
        engine.step(40)
        assert [(await sample.result()).text for sample in neighbours] == [text_of(40)] * len(neighbours)
        assert engine.manager.recovery.num_restarts == 2 and not engine.manager.is_recovering

    asyncio.run(work())


@scenario
async def test_a_request_that_has_passed_its_trial_is_no_suspect_when_it_comes_again(engine: Engine) -> None:
    suspect = await one(engine, "good")
    engine.die(Blame({suspect.key: 1}))
    engine.restart()
    engine.step(4)
    assert suspect.key in engine.scheduler.running
    both = [await one(engine, "good"), await one(engine, "new")]
    assert engine.sent()[-2:] == [sample.key for sample in both]


@scenario
async def test_a_short_answer_that_has_ended_is_no_suspect_when_it_comes_again(engine: Engine) -> None:
    (suspect,) = await engine.submit(1, max_new_tokens=1)
    engine.die(Blame({suspect.key: 0}))
    engine.restart()
    engine.step()
    assert suspect.is_complete
    await engine.submit(1, max_new_tokens=1)
    assert not engine.manager.is_recovering


@scenario
async def test_an_equal_request_that_waits_ends_with_the_culprit(engine: Engine) -> None:
    """Its client may have sent it again during the restart. It would kill the engine a third time."""
    poison, good = await one(engine, "poison"), await one(engine, "good")
    engine.die(Blame({poison.key: 0, good.key: 0}))
    again = await one(engine, "poison")
    engine.restart()
    assert engine.sent() == [poison.key]
    assert engine.die(Blame({poison.key: 0}))
    engine.restart()
    assert await is_fatal(poison) and await is_fatal(again)
    assert engine.sent() == [good.key] and engine.manager.recovery.num_fatal == 2


@scenario
async def test_a_suspect_that_has_waited_for_other_trials_is_tried_after_them(engine: Engine) -> None:
    """It came while others were tried. Those that have waited with it go first, so suspects cannot hold them up."""
    first, second = await one(engine, "first"), await one(engine, "second")
    engine.die(Blame({first.key: 0, second.key: 0}))
    second.close()
    engine.restart()
    again, new = await one(engine, "second"), await one(engine, "new")
    assert engine.sent() == [first.key]
    engine.step(3)
    assert engine.sent() == [first.key, new.key, again.key] and engine.manager.is_recovering
    engine.step(3)
    assert not engine.manager.is_recovering


@scenario
async def test_a_sample_whose_end_the_engine_has_told_is_no_suspect(engine: Engine) -> None:
    gone, stays = await one(engine, "gone"), await one(engine, "stays")
    gone.close()
    await asyncio.sleep(0)
    engine.die(Blame(None))
    engine.restart()
    engine.step(3)
    assert engine.sent() == [stays.key] and not engine.manager.is_recovering
    assert engine.manager.recovery._strikes._strikes == {}


@scenario
async def test_stopped_samples_do_not_pile_up(engine: Engine) -> None:
    sample = await one(engine, "good")
    finish = AbortFinish("x", status_code=500, err_type="InvalidLogits")
    out = TextOut(tokens=TokenOut(rid=sample.key, token_ids=[], finish=finish, counts=Counts(1)), text="")
    engine.manager.on_message(BatchTextOut([out]))
    assert engine.scheduler.aborted == [sample.key], "the detokenizer may have ended it"
    engine.scheduler.dead = True  # it does not know the sample
    never = await one(engine, "never arrives")
    engine.manager.on_message(BrokenMessage([never.key], "broken"))
    assert never.is_over
    assert not engine.manager.recovery._stopped


def test_the_stopped_samples_of_an_engine_that_hangs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is kept with its prompt, and clients come and go while a step takes minutes."""
    monkeypatch.setattr(recovery, "MAX_STOPPED", 2)

    async def work() -> None:
        engine = Engine()
        engine.scheduler.dead = True
        samples = await engine.submit_different(4)
        for sample in samples:
            sample.close()
        assert list(engine.manager.recovery._stopped) == [sample.key for sample in samples[:2]]

    asyncio.run(work())


@scenario
async def test_suspects_do_not_wait_without_end(engine: Engine) -> None:
    clock = [50.0]
    engine.manager.pause.now = lambda: clock[0]  # type: ignore[method-assign]
    samples = await engine.submit_different(5)
    engine.step(3)
    new = await one(engine, "new")
    engine.die(Blame({sample.key: 3 for sample in samples}))
    clock[0] += TRIALS_S  # a restart takes long
    engine.restart()
    engine.step(3)
    assert engine.sent() == [sample.key for sample in samples[:2]] and not new.is_over
    clock[0] += TRIALS_S
    engine.step(1)
    errors = [error_of((await sample.result()).finish) for sample in samples[2:]]
    assert all(isinstance(error, WaitingTimeout) and "died in a step" in error.message for error in errors)
    assert [error.retry_after_s for error in errors if error] == [60] * 3
    engine.step(2)
    assert engine.sent()[2:] == [new.key]
    again = await one(engine, "2")
    assert engine.manager.is_recovering and engine.sent()[-1] == again.key, "it is a suspect still"
    engine.step(40)
    for sample in [*samples[:2], new, again]:
        assert (await sample.result()).text == text_of(40)


@scenario
async def test_the_time_of_trials_begins_anew_with_each_engine(engine: Engine) -> None:
    clock = [50.0]
    engine.manager.pause.now = lambda: clock[0]  # type: ignore[method-assign]
    samples = await engine.submit_different(3)
    for blame in (Blame({sample.key: 0 for sample in samples}), None):
        engine.die(blame)
        clock[0] += TRIALS_S - 1
        engine.restart()
        engine.step()
    assert not any(sample.is_over for sample in samples)


def request(number: int) -> GenerateReq:
    return GenerateReq("1", number.to_bytes(4, "little"), options())


def test_strikes_are_forgotten_after_a_while_and_if_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strikes, "MAX_STRIKES", 2)
    clock = [0.0]
    known = Strikes(10.0, lambda: clock[0])
    digests = [strikes.digest_of(request(number)) for number in range(4)]

    def found() -> list[Any]:
        return [number for number in range(4) if known.find(request(number))]

    for number in range(3):
        known.add(digests[number], 5)
        clock[0] += 1
    assert found() == [1, 2]
    known.add(digests[1], 3)
    assert known.find(request(1)) == (digests[1], 5), "the later place counts"
    known.add(digests[3], 5)
    assert found() == [1, 3], "the oldest one was the second"
    known.acquit(digests[1], 4)
    assert found() == [1, 3]
    known.acquit(digests[1], 5)
    assert found() == [3]
    clock[0] += 10
    assert found() == []


@pytest.mark.parametrize(
    "ignored",
    [
        {"sampling": {"sampling_seed": 77}},
        {"sampling": {"max_new_tokens": 9}},
        {"sampling": {"min_new_tokens": 2}},
        {"stream": False},
        {"priority": 3},
        {"tenant": "other"},
        {"waiting_timeout": 9.0},
        {"running_timeout": 9.0},
        {"session_id": "other"},
        {"retention_seconds": 9.0},
    ],
    ids=str,
)
def test_who_asks_and_for_how_many_tokens_does_not_make_another_request(ignored: dict[str, Any]) -> None:
    one = request(0)
    sampling = msgspec.structs.replace(one.options.sampling, **ignored.get("sampling", {}))
    again = msgspec.structs.replace(one.options, **{**ignored, "sampling": sampling})
    assert again != one.options
    assert strikes.digest_of(msgspec.structs.replace(one, rid="2", options=again)) == strikes.digest_of(one)
    hotter = msgspec.structs.replace(again, sampling=msgspec.structs.replace(sampling, temperature=0.37))
    for other in (hotter, msgspec.structs.replace(again, cache_salt="other")):
        assert strikes.digest_of(msgspec.structs.replace(one, options=other)) != strikes.digest_of(one)


def test_a_refusal_says_for_how_long() -> None:
    clock = [5.0]
    known = Strikes(10.0, lambda: clock[0])
    known.convict(request(0))
    clock[0] = 12.0
    error = known.refusal(request(0))
    assert error is not None and error.message.endswith("it is refused for 3 s more")
    assert known.refusal(request(1)) is None
    clock[0] = 15.0
    assert known.refusal(request(0)) is None


@scenario
async def test_a_suspicion_is_forgotten_with_time(engine: Engine) -> None:
    poison = await one(engine, "poison")
    poison.close()
    engine.scheduler.dead = True
    engine.die(Blame({poison.key: 0}))
    engine.restart()
    engine.manager.recovery._clock = lambda: time.monotonic() + 601
    await one(engine, "poison")
    assert not engine.manager.is_recovering
