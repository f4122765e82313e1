"""A restarted engine, or the next server, may have less memory for KV: what becomes of the requests of the old one."""

from __future__ import annotations

from typing import Any

import pytest
from fake_http import text_of
from gated_engine import Engine, options, scenario

from tercet.managers.generation import Generation
from tercet.managers.req_factory import ReqFactory
from tercet.srt.errors import PromptTooLong
from tercet.srt.io_struct import GenerateReq, LengthFinish, Resumed, pack_ids

POOL = 30


def limits(engine: Engine) -> list[tuple[int | None, int]]:
    """`max_new_tokens` and `min_new_tokens` of what the scheduler has."""
    every = [request.options.sampling for request in engine.scheduler.received]
    return [(sampling.max_new_tokens, sampling.min_new_tokens) for sampling in every]


def accepts(engine: Engine, request: GenerateReq) -> bool:
    """Whether a scheduler with the pool of `POOL` tokens takes it."""
    factory = ReqFactory(
        eos_ids=frozenset(),
        max_total_tokens=POOL,
        stream_interval=1,
        slot_of=lambda ref: 0,
        make_stop_checker=lambda sampling: None,
    )
    try:
        factory.make(request)
    except PromptTooLong:
        return False
    return True


@scenario
async def test_streams_and_held_requests_get_the_room_that_is_left(engine: Engine) -> None:
    samples = await engine.submit(1, max_new_tokens=None)
    samples += await engine.submit(1, max_new_tokens=100, min_new_tokens=60, ignore_eos=True)
    samples += await engine.submit(1, max_new_tokens=7)
    engine.step(5)
    engine.die(None)
    held = await engine.submit(1, max_new_tokens=None)
    engine.restart(POOL)
    room = POOL - len("hi")
    assert limits(engine) == [(room, 0), (room, room), (7, 0), (room, 0)]
    assert all(accepts(engine, request) for request in engine.scheduler.received)
    engine.die(None)
    engine.restart(1000)  # it has all of its memory again
    assert limits(engine) == [(254, 0), (100, 60), (7, 0), (254, 0)]
    engine.die(None)
    engine.restart(POOL)
    engine.step(40)
    for one, length in zip([*samples, *held], (room, room, 7, room), strict=True):
        out = await one.result()
        assert (out.text, out.finish) == (text_of(length), LengthFinish(length))


@pytest.mark.parametrize(
    ("num_prompt", "num_tokens", "max_new", "fits"),
    [
        (29, 0, 50, True),
        (30, 0, 50, False),
        (30, 0, 0, True),
        (31, 0, 0, False),
        (20, 10, 50, True),
        (20, 11, 50, False),
        (20, 10, 11, True),
        (29, 1, 1, True),
        (29, 2, 9, False),
    ],
)
def test_only_what_does_not_fit_is_refused(num_prompt: int, num_tokens: int, max_new: int, fits: bool) -> None:
    @scenario
    async def work(engine: Engine) -> None:
        engine.die(None)
        engine.restart(POOL)
        resumed = Resumed(list(range(num_tokens)), None, 0) if num_tokens else None
        ids = pack_ids(range(num_prompt))
        request = GenerateReq("1", ids, options(max_new_tokens=max_new, sampling_seed=1), resumed)
        assert accepts(engine, engine.manager.inputs.fitted(request)) == fits

    work()


@scenario
async def test_a_sample_of_another_server_gets_the_room_of_this_one(engine: Engine) -> None:
    engine.die(None)
    engine.restart(POOL)
    owner: Any = type("Owner", (), {"rid": "r", "prompt_ids": (1, 2), "on_end": print, "stop": print})()
    engine.manager.restore(
        Generation(owner, 0, "1"), pack_ids([1, 2]), options(max_new_tokens=254, sampling_seed=1), age_s=3.0
    )
    assert limits(engine) == [(POOL - 2, 0)]
