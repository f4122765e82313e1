"""Updates of the weights as clients see them: running requests end first, and new ones wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_http import FakeScheduler, make_manager

from tercet.managers.generation import Generation
from tercet.managers.request_registry import Prompt
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.managers.weight_control import WeightControl
from tercet.srt.errors import EngineBusy, EngineRestarting, InvalidRequest, TercetError
from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.pause_messages import ContinueReq, PauseReq
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts

NEW_WEIGHTS = WeightFacts("bfloat16", 7)
OPTIONS = RequestOptions(sampling=SamplingParams(max_new_tokens=4), stream=True)


class Engine:
    """A manager with a fake scheduler that loads weights. `refusal`, `failure`, `busy`: its answer."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = FakeScheduler()
        self.manager: TokenizerManager = make_manager(self.scheduler, **settings)
        self.updates: list[UpdateWeightsReq] = []
        self.refusal: str | None = None
        self.failure: str | None = None
        self.busy: str | None = None
        self.scheduler.answers[UpdateWeightsReq] = self._answer

    def _answer(self, message: UpdateWeightsReq) -> UpdateWeightsReply:
        assert self.scheduler.is_paused
        self.updates.append(message)
        return UpdateWeightsReply(
            message.call_id, refusal=self.refusal, failure=self.failure, busy=self.busy, facts=NEW_WEIGHTS
        )

    def update(
        self, version: str | None = "2", *, abort_all: bool = False, **timeout: float
    ) -> Coroutine[Any, Any, int]:
        return self.manager.weights.update("/w/2", "auto", version, dtype="float32", abort_all=abort_all, **timeout)

    async def submit(self) -> Generation:
        (generation,) = await self.manager.submit("hi", OPTIONS)
        return generation


def test_an_update_pauses_loads_and_continues() -> None:
    async def work() -> None:
        engine = Engine()
        assert isinstance(engine.manager.weights, WeightControl)
        assert await engine.update() == 0
        assert [type(one) for one in engine.scheduler.pauses] == [PauseReq, ContinueReq]
        (message,) = engine.updates
        assert (message.model_path, message.load_format, message.weight_version) == ("/w/2", "auto", "2")
        args = engine.manager.server_args
        assert args is engine.manager.weights.server_args
        assert (args.model_path, args.weight_version, args.dtype) == ("/w/2", "2", "float32")
        assert (args.tokenizer_path, args.model_name) == ("/models/tiny-1", "tiny")
        assert engine.manager.weights.facts == NEW_WEIGHTS
        generation = await engine.submit()
        assert generation.weight_version == "2" and (await generation.result()).finish == LengthFinish(4)

    asyncio.run(work())


def test_a_tokenizer_of_its_own_stays_and_equal_settings_are_an_update() -> None:
    async def work() -> None:
        engine = Engine(tokenizer_path="/t")
        for number in range(1, 3):
            await engine.update()
            assert engine.manager.weights.num_updates == number
            assert engine.manager.server_args.tokenizer_path == "/t"

    asyncio.run(work())


def test_weights_without_a_name_get_one_of_their_own() -> None:
    async def work() -> None:
        engine = Engine()
        for _ in range(2):
            await engine.update(None)
        assert len({message.weight_version for message in engine.updates} | {"default"}) == 3

    asyncio.run(work())


def test_running_requests_end_with_the_old_weights_and_new_ones_wait() -> None:
    async def work() -> None:
        engine = Engine(max_queued_requests=1)
        engine.scheduler.gate = True
        running = await engine.submit()
        updating = asyncio.create_task(engine.update())
        await asyncio.sleep(0)
        waiting = await engine.submit()
        refused = await engine.submit()
        assert isinstance((await refused.result()).finish, AbortFinish)  # as many may wait as in the queue
        assert len(engine.scheduler.received) == 1 and not updating.done()
        with pytest.raises(EngineBusy, match="already"):
            await engine.update()
        engine.scheduler.gate = False
        engine.scheduler._write(*engine.scheduler.held.pop(0))
        assert (await running.result()).finish == LengthFinish(4)
        await updating
        assert (await waiting.result()).finish == LengthFinish(4)
        assert (running.weight_version, waiting.weight_version) == ("default", "2")

    asyncio.run(work())


def test_requests_that_run_too_long_keep_the_old_weights() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.gate = True
        running = await engine.submit()
        updating = asyncio.create_task(engine.update(drain_timeout_s=0.01))
        await asyncio.sleep(0)
        waiting = await engine.submit()
        assert len(engine.scheduler.received) == 1
        with pytest.raises(EngineBusy, match=r"1 samples still ran after 0\.01 s"):
            await updating
        assert not engine.updates and not engine.scheduler.pauses and not engine.manager.weights.is_holding
        assert len(engine.scheduler.received) == 2
        engine.scheduler.gate = False
        for held in engine.scheduler.held:
            engine.scheduler._write(*held)
        for generation in (running, waiting):
            assert (await generation.result()).finish == LengthFinish(4) and generation.weight_version == "default"
        await engine.update()
        assert engine.manager.weights.version == "2"

    asyncio.run(work())


def test_a_request_whose_prompt_is_not_ready_delays_no_update() -> None:
    async def work() -> None:
        engine = Engine()
        request = engine.manager.open([Prompt(content="hi", options=OPTIONS)])
        await engine.update(drain_timeout_s=0.0)
        await engine.manager.start(request.prompts[0])
        (generation,) = request.prompts[0].generations
        assert (await generation.result()).finish == LengthFinish(4) and generation.weight_version == "2"

    asyncio.run(work())


def test_requests_may_be_aborted_instead() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.mute = True
        running = await engine.submit()
        await engine.update(abort_all=True, drain_timeout_s=0.0)  # they have the time that they need to end
        finish = (await running.result()).finish
        assert isinstance(finish, AbortFinish) and finish.status_code is None

    asyncio.run(work())


def test_in_a_pause_nothing_ends_and_the_pause_goes_on() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.gate = True
        running = await engine.submit()
        await engine.manager.pause.begin("retract")
        await engine.update()
        assert engine.scheduler.is_paused and engine.manager.pause.is_on and len(engine.scheduler.pauses) == 1
        assert running.weight_version == "2"
        running.close()

    asyncio.run(work())


def test_a_pause_that_begins_while_weights_are_loaded_goes_on_after_them() -> None:
    async def work() -> None:
        engine = Engine()
        pauses: list[asyncio.Task[None]] = []

        def answer(message: UpdateWeightsReq) -> UpdateWeightsReply:
            # The scheduler is loading, so it answers the pause after the update.
            pauses.append(asyncio.create_task(engine.manager.pause.begin("in_place")))
            return UpdateWeightsReply(message.call_id, 0, facts=NEW_WEIGHTS)

        engine.scheduler.answers[UpdateWeightsReq] = answer
        await engine.update()
        await pauses[0]
        assert engine.manager.pause.is_on and engine.scheduler.is_paused
        await engine.manager.pause.end()
        assert not engine.manager.pause.is_wanted and not engine.scheduler.is_paused

    asyncio.run(work())


@pytest.mark.parametrize(
    ("kind", "error"), [("refusal", InvalidRequest), ("failure", TercetError), ("busy", EngineBusy)]
)
def test_after_an_error_the_old_weights_serve(kind: str, error: type[TercetError]) -> None:
    async def work() -> None:
        engine = Engine()
        setattr(engine, kind, "shape 3")
        args = engine.manager.weights.server_args
        with pytest.raises(error, match="shape 3"):
            await engine.update()
        assert engine.manager.weights.server_args is args and not engine.scheduler.is_paused
        generation = await engine.submit()
        assert (await generation.result()).finish == LengthFinish(4) and generation.weight_version == "default"

    asyncio.run(work())


def test_a_caller_that_gives_up_leaves_the_version_of_the_weights_in_use() -> None:
    """Ctrl-C in a program with an Engine: the scheduler loads the weights nevertheless."""

    async def work() -> None:
        engine = Engine()
        updating = asyncio.create_task(engine.update())
        while not engine.updates:
            await asyncio.sleep(0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        waiting = await engine.submit()
        assert (await waiting.result()).finish == LengthFinish(4)
        assert waiting.weight_version == engine.manager.weights.version == "2"
        assert not engine.scheduler.is_paused and not engine.manager.weights.is_holding

    asyncio.run(work())


def test_an_update_during_a_restart_does_not_wait_for_requests_that_no_engine_has() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.gate = True
        running = await engine.submit()
        engine.manager.on_death(None)
        with pytest.raises(EngineRestarting):
            await engine.update(drain_timeout_s=0.0)
        assert not engine.manager.weights.is_holding and not engine.manager.weights.is_updating
        running.close()

    asyncio.run(work())


def test_a_client_that_continues_without_a_pause_does_not_disturb_an_update() -> None:
    async def work() -> None:
        engine = Engine()
        updating = asyncio.create_task(engine.update())
        while not engine.scheduler.pauses:
            await asyncio.sleep(0)
        await engine.manager.pause.end()
        await updating
        assert [type(one) for one in engine.scheduler.pauses] == [PauseReq, ContinueReq]
        assert engine.manager.weights.version == "2"

    asyncio.run(work())


def test_a_restart_ends_the_update_and_sends_what_waited() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.dead = True
        del engine.scheduler.answers[UpdateWeightsReq]
        updating = asyncio.create_task(engine.update())
        await asyncio.sleep(0)
        waiting = await engine.submit()
        engine.manager.on_death(None)
        with pytest.raises(EngineRestarting):
            await updating
        assert not engine.manager.weights.is_holding and engine.manager.weights.version == "default"
        second = FakeScheduler()
        second.manager = engine.manager
        engine.manager.resume(second, engine.manager.facts)
        assert (await waiting.result()).finish == LengthFinish(4)

    asyncio.run(work())
