"""Samples that a new engine gets while an update of the weights waits or loads: no answer has tokens of two weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from breakable_http import Connection
from fake_http import Site, loaded_weights, text_of
from gated_engine import Engine, scenario
from resumed_sites import begun, kill, make_site, read

from tercet.managers.recovery import Blame
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.io_struct import BatchTextOut
from tercet.srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq

PATIENCE_S = 60


def update(manager: TokenizerManager) -> asyncio.Task[int]:
    return asyncio.create_task(manager.weights.update("/w/2", "auto", "new", dtype="float32", abort_all=False))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


@scenario
async def test_suspects_that_wait_for_their_trials_end_before_the_update(engine: Engine) -> None:
    """The engine is restarted so quickly that the update does not notice. Then the client of the trial leaves."""
    manager = engine.manager
    first, second = await engine.submit_different(2)
    engine.step(2)
    updating = update(manager)
    await asyncio.sleep(0)
    (new,) = await engine.submit(1, "new")
    engine.die(Blame({first.key: 2, second.key: 2}))
    engine.restart()
    engine.scheduler.answers[UpdateWeightsReq] = loaded_weights
    engine.scheduler.dead = True
    first.close()
    engine.scheduler.dead = False
    for _ in range(5):
        await asyncio.sleep(0.02)
    assert not engine.scheduler.pauses and engine.sent() == [first.key]
    manager.on_message(BatchTextOut([]))  # any sign of life
    assert engine.sent() == [first.key, second.key]
    engine.step(40)
    assert (await second.result()).text == text_of(40) and second.weight_version == "default"
    await asyncio.wait_for(updating, PATIENCE_S)
    assert engine.sent() == [first.key, second.key, new.key] and new.weight_version == "new"


@scenario
async def test_in_a_pause_suspects_that_wait_for_their_trials_go_on_with_the_new_weights(engine: Engine) -> None:
    first, second = await engine.submit_different(2)
    engine.step(2)
    engine.die(Blame({first.key: 2, second.key: 2}))
    engine.restart()
    engine.scheduler.answers[UpdateWeightsReq] = loaded_weights
    await engine.manager.pause.begin("retract")
    assert second.waits_for_engine and second.output_ids
    await asyncio.wait_for(update(engine.manager), PATIENCE_S)
    await engine.manager.pause.end()
    engine.step(80)
    for one in (first, second):
        assert (await one.result()).text == text_of(40) and one.weight_version == "new"


@scenario
async def test_new_requests_wait_for_the_update_also_after_a_restart(engine: Engine) -> None:
    (running,) = await engine.submit(1)
    engine.step(2)
    updating = update(engine.manager)
    await asyncio.sleep(0)
    (new,) = await engine.submit(1)
    engine.die(None)
    engine.restart()
    engine.scheduler.answers[UpdateWeightsReq] = loaded_weights
    assert engine.sent() == [running.key]
    engine.step(40)
    await asyncio.wait_for(updating, PATIENCE_S)
    assert engine.sent() == [running.key, new.key] and new.weight_version == "new"


class Loading:
    """A site with a stream of the server before, whose engine loads weights until a test lets it answer."""

    def __init__(self, tmp_path: Path) -> None:
        file, self.events = begun(tmp_path / "streams", weight_version="old")
        self.site: Site = make_site(file, weight_version="old")
        self.file = file
        self.messages: list[UpdateWeightsReq] = []
        self.send = self.site.scheduler.send
        self.site.scheduler.send = self._send  # type: ignore[method-assign]

    def _send(self, message: Any) -> None:
        if isinstance(message, UpdateWeightsReq):
            self.messages.append(message)
        else:
            self.send(message)

    def answer(self, refusal: str | None) -> None:
        def reply(message: UpdateWeightsReq) -> UpdateWeightsReply:
            return msgspec.structs.replace(loaded_weights(message), refusal=refusal)

        self.site.scheduler.answers[UpdateWeightsReq] = reply
        self.send(self.messages.pop())

    def ask(self) -> Connection:
        return Connection(self.site, "GET", "/v1/streams", last_event_id=self.events[-1][0].decode())


@pytest.mark.parametrize("refusal", [None, "no such folder"])
def test_a_stream_of_another_server_that_comes_while_weights_are_loaded(tmp_path: Path, refusal: str | None) -> None:
    loading = Loading(tmp_path)
    manager, scheduler = loading.site.manager, loading.site.scheduler

    async def run() -> None:
        updating = update(manager)
        await until(lambda: loading.messages)
        stream = loading.ask()
        await until(lambda: any(one.waits_for_engine for one in manager.live_samples()))
        assert not scheduler.received
        loading.answer(refusal)
        await asyncio.wait([updating, stream.done])
        assert stream.data.endswith(b"[DONE]\n\n") and (updating.exception() is None) == (refusal is None)
        assert (b"stream_changed" in stream.data) == (refusal is None) == (not scheduler.received)

    loading.site.run(run())
    kill(loading.site, loading.file)


def test_a_stream_of_another_server_that_comes_before_ends_with_its_weights(tmp_path: Path) -> None:
    loading = Loading(tmp_path)
    site, scheduler = loading.site, loading.site.scheduler
    scheduler.gate = True

    async def run() -> None:
        other = Connection(site, "POST", "/v1/completions", {"prompt": "b", "max_tokens": 9, "stream": True})
        await until(lambda: scheduler.held)
        updating = update(site.manager)
        await until(lambda: site.manager.weights.is_holding)
        stream = loading.ask()
        await until(lambda: len(scheduler.received) == 2)
        for one in (other, stream):
            await read(site, one, 1000)
        assert b"error" not in stream.data
        await until(lambda: loading.messages)
        loading.answer(None)
        await asyncio.wait_for(updating, PATIENCE_S)

    site.run(run())
    kill(site, loading.file)
