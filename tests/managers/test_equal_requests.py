"""Requests that equal one that has killed the engine twice: they end with it, wherever they wait."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fake_http import text_of
from gated_engine import Engine, options, scenario

from tercet.managers.generation import Generation, error_of
from tercet.managers.recovery import Blame
from tercet.managers.strikes import digest_of
from tercet.srt.adapters import AdapterRef
from tercet.srt.errors import FatalRequest
from tercet.srt.io_struct import GenerateReq


async def is_fatal(sample: Generation) -> bool:
    return isinstance(error_of((await asyncio.wait_for(sample.result(), 0.5)).finish), FatalRequest)


@scenario
async def test_a_held_copy_ends_with_the_culprit(engine: Engine) -> None:
    """A client that sends its request again during the restart must not cost two more deaths."""
    neighbours = await engine.submit(3, "good")
    (poison,) = await engine.submit(1, "poison")
    engine.step(2)
    assert not engine.die(Blame({one.key: 2 for one in [*neighbours, poison]}))
    (held,) = await engine.submit(1, "poison")
    (new,) = await engine.submit(1, "other")
    engine.restart()
    while poison.key not in engine.scheduler.running:
        engine.step()
    assert engine.die(Blame(dict.fromkeys(engine.sent(), 2)))
    assert await is_fatal(poison) and await is_fatal(held)
    assert engine.manager.recovery.num_fatal == 2
    engine.restart()
    engine.step(50)
    assert held.key not in engine.sent()
    for one in [*neighbours, new]:
        assert (await one.result()).text == text_of(40)


@scenario
async def test_equal_requests_of_one_step_end_together(engine: Engine) -> None:
    (good,) = await engine.submit(1, "good")
    poisons = await engine.submit(3, "poison")
    engine.step()
    blame = Blame({one.key: 1 for one in poisons})
    assert not engine.die(blame)
    engine.restart()
    engine.step()
    assert engine.die(Blame({poisons[0].key: 1}))
    engine.restart()
    assert [await is_fatal(one) for one in poisons] == [True] * 3
    assert engine.sent() == [good.key] and not engine.manager.is_recovering


def test_what_makes_two_requests_equal() -> None:
    def digest(ids: bytes = b"abcd", sampling: dict[str, Any] | None = None, **others: Any) -> bytes:
        return digest_of(GenerateReq("1", ids, msgspec.structs.replace(options(**sampling or {}), **others)))

    same = [digest(sampling={"max_new_tokens": 3}), digest(sampling={"sampling_seed": 5}), digest(tenant="key-2")]
    same += [digest(stream=False), digest(priority=1), digest(waiting_timeout=1.0), digest(running_timeout=1.0)]
    same += [digest(session_id="s"), digest(retention_seconds=1.0)]
    assert set(same) == {digest()}
    others = [digest(sampling={"temperature": 0.3}), digest(b"efgh"), digest(cache_salt="s")]
    others += [digest(adapter=AdapterRef("a", fingerprint)) for fingerprint in ("f1", "f2")]
    assert len({digest(), *others}) == 6
