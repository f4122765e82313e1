"""LoRA adapters as the TokenizerManager sees them, with a fake scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fake_adapters import PIRATE, WITH_PIRATE, FakeLoads
from fake_http import FakeScheduler, make_manager

from tercet.managers.adapter_control import AdapterControl
from tercet.managers.generation import Generation
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.adapters import AdapterFacts, LoadAdapterReq, UnloadAdapterReq
from tercet.srt.errors import EngineBusy, EngineRestarting, InvalidRequest, TercetError
from tercet.srt.io_struct import AbortReq
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

OPTIONS = RequestOptions(sampling=SamplingParams(max_new_tokens=4), stream=True, adapter=PIRATE.ref)


class Engine:
    def __init__(self, **settings: Any) -> None:
        self.scheduler = FakeScheduler()
        self.manager: TokenizerManager = make_manager(self.scheduler, **{**WITH_PIRATE, **settings})
        self.loads = FakeLoads(self.scheduler)
        self.adapters: AdapterControl = self.manager.adapters

    async def submit(self, options: RequestOptions = OPTIONS) -> Generation:
        (generation,) = await self.manager.submit("hi", options)
        return generation


def test_the_next_engine_loads_the_adapters_of_now() -> None:
    async def work() -> None:
        engine = Engine()
        await engine.adapters.load("ninja=1", "/n")
        assert engine.manager.server_args.adapter_paths == {"pirate": PIRATE.path, "ninja=1": "/n"}
        await engine.adapters.unload("pirate")
        assert engine.manager.server_args.adapter_paths == {"ninja=1": "/n"}
        await engine.adapters.unload("ninja=1")
        args = engine.manager.server_args
        assert args.adapter_paths == {} and args.enable_lora

    asyncio.run(work())


def test_a_load_that_fails_changes_nothing() -> None:
    async def work() -> None:
        engine = Engine()
        before = engine.manager.server_args
        engine.loads.refusal = "no"
        with pytest.raises(InvalidRequest, match=r"^no$"):
            await engine.adapters.load("x", "/x")
        with pytest.raises(InvalidRequest, match=r"^no$"):
            await engine.adapters.unload("pirate")
        engine.loads.refusal, engine.loads.failure = None, "broken"
        with pytest.raises(TercetError, match=r"^broken$"):
            await engine.adapters.load("x", "/x")
        assert engine.manager.server_args == before and engine.adapters.find("pirate") == PIRATE.ref
        assert engine.adapters.find("x") is None and not engine.adapters.is_loading

    asyncio.run(work())


def test_only_one_load_has_a_name() -> None:
    async def work() -> None:
        engine = Engine()
        first = asyncio.create_task(engine.adapters.load("x", "/x"))
        await asyncio.sleep(0)
        assert engine.adapters.is_loading
        with pytest.raises(InvalidRequest, match="is loaded already"):
            await engine.adapters.load("x", "/y")
        await first
        assert len(engine.loads.asked) == 1 and not engine.adapters.is_loading

    asyncio.run(work())


def test_an_unload_waits_for_requests_that_wait_for_the_engine() -> None:
    """They are not in the scheduler, which would not wait for them."""

    async def work() -> None:
        engine = Engine()
        engine.scheduler.mute = True
        generation = await engine.submit()
        engine.manager.on_death(None)
        second = FakeScheduler()
        second.mute, second.manager = True, engine.manager
        loads = FakeLoads(second)
        engine.manager.resume(second, msgspec.structs.replace(engine.manager.facts, adapters=[PIRATE]))
        unloading = asyncio.create_task(engine.adapters.unload("pirate"))
        await asyncio.sleep(0.1)
        assert not loads.asked and engine.adapters.find("pirate") is None and not engine.adapters.usable
        with pytest.raises(EngineBusy, match="already"):
            await engine.adapters.unload("pirate")
        with pytest.raises(EngineBusy, match="is being unloaded; load it when"):
            await engine.adapters.load("pirate", "/p")
        generation.abort()
        await generation.result()
        await unloading
        assert [type(one) for one in loads.asked] == [UnloadAdapterReq]

    asyncio.run(work())


def test_an_unload_goes_on_without_its_client() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.mute = True
        generation = await engine.submit()
        unloading = asyncio.create_task(engine.adapters.unload("pirate"))
        await asyncio.sleep(0)
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        assert engine.adapters.find("pirate") is None
        generation.abort()
        await generation.result()
        async with asyncio.timeout(30):
            while engine.manager.server_args.adapter_paths:
                await asyncio.sleep(0.01)

    asyncio.run(work())


def test_a_death_ends_loads_and_the_next_engine_tells_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.dead = True
        loading = asyncio.create_task(engine.adapters.load("x", "/x"))
        unloading = asyncio.create_task(engine.adapters.unload("pirate"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.manager.on_death(None)
        for call in (loading, unloading):
            with pytest.raises(EngineRestarting):
                await call
        with pytest.raises(EngineRestarting):
            await engine.adapters.load("x", "/x")
        assert engine.manager.server_args.adapter_paths == {"pirate": PIRATE.path}
        other = AdapterFacts("ninja", "/n", "f9", 1)
        with caplog.at_level("INFO"):
            engine.manager.resume(FakeScheduler(), msgspec.structs.replace(engine.manager.facts, adapters=[other]))
        assert "no longer loaded: pirate" in caplog.text
        assert engine.adapters.usable == [other] and engine.adapters.find("pirate") is None
        assert engine.manager.server_args.adapter_paths == {"ninja": "/n"}

    asyncio.run(work())


def test_requests_keep_their_adapter_in_the_next_engine() -> None:
    async def work() -> None:
        engine = Engine()
        engine.scheduler.mute = True
        await engine.submit()
        engine.manager.on_death(None)
        second = FakeScheduler()
        second.mute, second.manager = True, engine.manager
        engine.manager.resume(second, engine.manager.facts)
        assert [one.options.adapter for one in second.received] == [PIRATE.ref]
        assert not any(isinstance(one, AbortReq | LoadAdapterReq) for one in second.received)

    asyncio.run(work())
