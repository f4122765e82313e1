"""A request is in the books from before its first await: what happens while its prompt is tokenised reaches it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_http import FakeScheduler, make_manager, text_of
from patience import PATIENCE_S

from tercet.managers.generation import Generation, error_of
from tercet.managers.request_registry import Prompt
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.errors import EngineDead, InvalidRequest
from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.text.tokenizer import Tokenizer

LONG_TEXT = "x" * 35_000
OPTIONS = RequestOptions(sampling=SamplingParams(max_new_tokens=4), stream=True)


class GatedTokenizer:
    """Tokenises when the gate opens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.entered = threading.Event()
        self.gate = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


class Waiting:
    """A request whose prompt is being tokenised in a thread."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = FakeScheduler()
        self.manager = make_manager(self.scheduler, allow_auto_truncate=True, **settings)
        assert self.manager.inputs.tokenizer is not None
        self.tokenizer = GatedTokenizer(self.manager.inputs.tokenizer)
        self.manager.inputs.tokenizer = self.tokenizer  # type: ignore[assignment]

    async def begin(self) -> asyncio.Task[list[Generation]]:
        task = asyncio.create_task(self.manager.submit(LONG_TEXT, OPTIONS, rid="mine"))
        assert await asyncio.to_thread(self.tokenizer.entered.wait, 20)
        return task

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            try:
                await asyncio.wait_for(work, PATIENCE_S)
            finally:
                self.tokenizer.gate.set()

        asyncio.run(whole())


async def _abort(manager: TokenizerManager) -> None:
    assert manager.abort("mine")
    assert not manager.abort("mine")


async def _abort_all(manager: TokenizerManager) -> None:
    manager.abort_all()


async def _die(manager: TokenizerManager) -> None:
    manager.fail("the scheduler process died")


@pytest.mark.parametrize(("event", "error"), [(_abort, None), (_abort_all, None), (_die, EngineDead)])
def test_a_prompt_in_a_thread_ends_at_once(event: Any, error: type[Exception] | None) -> None:
    waiting = Waiting()

    async def work() -> None:
        task = await waiting.begin()
        assert waiting.manager.num_unfinished == 1
        await event(waiting.manager)
        assert waiting.manager.num_unfinished == 0
        (generation,) = await task  # although the thread still works
        finish = (await generation.result()).finish
        assert isinstance(finish, AbortFinish)
        assert type(error_of(finish)) is (error or type(None))
        waiting.tokenizer.gate.set()
        await asyncio.sleep(0.02)
        assert not waiting.scheduler.received

    waiting.run(work())


def test_draining_waits_for_a_prompt_in_a_thread() -> None:
    waiting = Waiting()

    async def work() -> None:
        task = await waiting.begin()
        waiting.manager.draining = True
        assert waiting.manager.num_unfinished == 1
        waiting.tokenizer.gate.set()
        (generation,) = await task
        assert (await generation.result()).finish == LengthFinish(1)  # all that fits

    waiting.run(work())


def test_its_name_is_taken_and_cancelling_gives_it_back() -> None:
    waiting = Waiting()

    async def work() -> None:
        task = await waiting.begin()
        with pytest.raises(InvalidRequest, match="in use"):
            await waiting.manager.submit([1], OPTIONS, rid="mine")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert waiting.manager.num_unfinished == 0
        (again,) = await waiting.manager.submit([1], OPTIONS, rid="mine")
        assert (await again.result()).text == text_of(4)

    waiting.run(work())


def test_an_abort_that_meets_a_cancellation_does_not_hide_it() -> None:
    waiting = Waiting()

    async def work() -> None:
        task = await waiting.begin()
        waiting.manager.abort("mine")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    waiting.run(work())


def _prompts(*rids: str | None) -> list[Prompt]:
    return [Prompt(content=[1], options=OPTIONS, rid=rid) for rid in rids]


def test_one_namespace_for_requests_and_their_prompts() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler())
        single = manager.open(_prompts("single"))
        batch = manager.open(_prompts("a", "b", None), name="batch")
        for prompts, name in (
            (_prompts("single"), None),
            (_prompts("batch"), None),
            (_prompts("a"), None),
            (_prompts(None, None), "single"),
            (_prompts(None, None), "batch"),
            (_prompts(None, None), "b"),
            (_prompts("new", "b"), "other"),
            (_prompts("twice", "twice"), "other"),
            (_prompts("other", "x"), "other"),
        ):
            with pytest.raises(InvalidRequest, match="in use") as caught:
                manager.open(prompts, name=name)
            assert caught.value.param == "rid"
        assert manager.num_unfinished == 4, "a refused request takes nothing"
        assert manager.abort("a")
        assert manager.num_unfinished == 3
        assert manager.abort("batch")
        assert not manager.abort("b") and not manager.abort("batch")
        single.close()
        batch.close()
        manager.open(_prompts("single", "a"), name="batch")

    asyncio.run(work())


def test_a_request_that_is_aborted_between_its_prompts_submits_no_more() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        request = manager.open(_prompts(None, None, None), name="batch")
        await manager.start(request.prompts[0])
        assert manager.abort("batch")
        for prompt in request.prompts[1:]:
            await manager.start(prompt)
        for prompt in request.prompts:
            out = await prompt.generations[0].result()
            assert isinstance(out.finish, AbortFinish)
        assert len(scheduler.received) == 1 and not scheduler.running

    asyncio.run(work())


def test_a_name_is_free_when_its_last_sample_has_ended() -> None:
    """The client may use it again as soon as it has the answer, although the handler has not closed the request."""

    async def work() -> None:
        manager = make_manager(FakeScheduler())
        request = manager.open(_prompts("a", "b"), name="batch")
        for prompt in request.prompts:
            await manager.start(prompt)
        await request.prompts[0].generations[0].result()
        await request.prompts[1].generations[0].result()
        manager.open(_prompts("b", "a"), name="batch")

    asyncio.run(work())


def test_a_name_leads_to_the_samples_that_have_not_ended() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        options = RequestOptions(sampling=SamplingParams(n=2))
        first, second = await manager.submit("hi", options, rid="mine")
        first.close()
        with pytest.raises(InvalidRequest, match="in use"):
            manager.open(_prompts("mine"))
        assert manager.abort("mine") and scheduler.aborted == [first.key, second.key]
        second.close()
        assert not manager.abort("mine")

    asyncio.run(work())
