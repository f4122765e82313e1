"""The TokenizerManager in front of a scripted scheduler: what a client may count on, whatever happens behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, VOCAB_SIZE, FakeScheduler, byte_tokenizer, make_manager, text_of

from tercet.managers.generation import Generation, error_of
from tercet.managers.heartbeats import Heartbeats
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.errors import EngineBusy, EngineDead, InvalidRequest, PromptTooLong
from tercet.srt.io_struct import (
    AbortFinish,
    BatchTextOut,
    BrokenMessage,
    Counts,
    DetokenizerAlive,
    Heartbeat,
    LengthFinish,
    TextOut,
    TokenOut,
)
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def params(stream: bool = True, **values: Any) -> RequestOptions:
    return RequestOptions(sampling=SamplingParams(**{"max_new_tokens": 8, **values}), stream=stream)


async def one(manager: TokenizerManager, prompt: Any = "hi", **values: Any) -> Generation:
    (generation,) = await manager.submit(prompt, params(**values))
    return generation


def text_message(text: str, **tokens: Any) -> BatchTextOut:
    return BatchTextOut([TextOut(tokens=TokenOut(**tokens), text=text)])


def test_increments_are_in_order_and_merge_while_nobody_reads() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler())
        generation = await one(manager)
        await asyncio.sleep(0.02)  # all of it arrives
        outs = [out async for out in generation]
        assert len(outs) == 1
        assert outs[0].text == text_of(8)
        assert outs[0].finish == LengthFinish(8)
        read_at_once = [out async for out in await one(manager)]
        assert "".join(out.text for out in read_at_once) == text_of(8)
        assert [i for out in read_at_once for i in out.token_ids] == list(range(8))
        assert manager.num_unfinished == 0

    run(work())


def test_samples_get_seeds_of_their_own() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler)
        for generation in await manager.submit("hi", params(n=3, sampling_seed=2**63 - 2)):
            await generation.result()
        assert [req.options.sampling.sampling_seed for req in scheduler.received] == [2**63 - 2, 2**63 - 1, -(2**63)]
        assert {req.options.sampling.n for req in scheduler.received} == {1}
        await manager.submit("hi", params())
        await manager.submit("hi", params())
        drawn = [req.options.sampling.sampling_seed for req in scheduler.received[3:]]
        assert None not in drawn and drawn[0] != drawn[1]

    run(work())


def test_random_seed_repeats_the_draws() -> None:
    async def drawn(seed: int) -> list[int | None]:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler, random_seed=seed)
        for _ in range(3):
            await manager.submit("hi", params())
        return [req.options.sampling.sampling_seed for req in scheduler.received]

    assert asyncio.run(drawn(1)) == asyncio.run(drawn(1)) != asyncio.run(drawn(2))


def test_max_new_tokens_is_cut_to_the_context() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler)
        for asked in (None, 10_000):
            await manager.submit(list(range(200)), params(max_new_tokens=asked))
        assert [req.options.sampling.max_new_tokens for req in scheduler.received] == [CONTEXT_LEN - 200] * 2

    run(work())


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ("", InvalidRequest, "empty"),
        ([], InvalidRequest, "empty"),
        ([VOCAB_SIZE], InvalidRequest, f"[0, {VOCAB_SIZE})"),
        ([-1], InvalidRequest, "-1"),
        ("x" * CONTEXT_LEN, PromptTooLong, f"at most {CONTEXT_LEN - 1}"),
        ("x" * 10_000_000, PromptTooLong, "characters"),
        ("\ud800", InvalidRequest, "Unicode"),
    ],
    ids=["no text", "no ids", "id too large", "id negative", "too long", "far too long", "surrogate"],
)
def test_prompts_that_cannot_be(prompt: Any, kind: type[InvalidRequest], words: str) -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler)
        with pytest.raises(kind) as caught:
            await manager.submit(prompt, params())
        assert words in caught.value.message
        assert caught.value.param in ("prompt", "input_ids", None)
        assert not scheduler.received and manager.num_unfinished == 0

    run(work())


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler, allow_auto_truncate=True)
        await manager.submit("a" * 500 + "end", params())
        (ids,) = scheduler.prompts()
        assert len(ids) == CONTEXT_LEN - 1
        assert bytes(ids).decode().endswith("aend")

    run(work())


def test_a_name_is_for_one_request_at_a_time() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler)
        (first,) = await manager.submit("hi", params(), rid="mine")
        with pytest.raises(InvalidRequest, match="in use"):
            await manager.submit("hi", params(), rid="mine")
        await first.result()
        (again,) = await manager.submit("hi", params(), rid="mine")
        await again.result()
        with pytest.raises(InvalidRequest, match="rid"):
            await manager.submit("hi", params(), rid="")

    run(work())


def test_abort_is_exact_and_ends_all_samples() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        group = await manager.submit("hi", params(n=2), rid="r1")
        (other,) = await manager.submit("hi", params(), rid="r10")
        assert not manager.abort("r")
        assert manager.abort("r1")
        for generation in group:
            finish = (await generation.result()).finish
            assert isinstance(finish, AbortFinish) and error_of(finish) is None
        assert len(scheduler.aborted) == 2
        assert manager.num_unfinished == 1
        other.close()
        other.close()
        other.abort()
        assert len(scheduler.aborted) == 3

    run(work())


def test_an_abort_brings_all_tokens_so_far() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.gate = True
        scheduler.unsent = 4
        manager = make_manager(scheduler)
        (generation,) = await manager.submit("hi", params(stream=False), rid="mine")
        scheduler.release()
        await asyncio.sleep(0)
        assert manager.abort("mine") and manager.abort("mine")
        assert manager.num_unfinished == 1, "until the scheduler has told what there is"
        out = await generation.result()
        assert isinstance(out.finish, AbortFinish) and error_of(out.finish) is None
        assert (out.text, out.counts.completion_tokens) == (text_of(5), 5)
        assert len(scheduler.aborted) == 1
        assert manager.num_unfinished == 0

    run(work())


def test_an_abort_that_nobody_answers_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.managers.generation.ABORT_TIMEOUT_S", 0.01)

    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = scheduler.dead = True
        manager = make_manager(scheduler)
        generation = await one(manager)
        generation.abort()
        assert isinstance((await generation.result()).finish, AbortFinish)
        assert len(scheduler.aborted) == 1

    run(work())


def test_nobody_waits_for_what_nobody_reads() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = scheduler.dead = True
        manager = make_manager(scheduler)
        for aborted_before in (False, True):
            generation = await one(manager)
            if aborted_before:
                generation.abort()
            generation.close()
            assert manager.num_unfinished == 0
        assert len(scheduler.aborted) == 2

    run(work())


def test_text_with_a_token_that_the_model_has_no_row_for(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        manager = make_manager(scheduler)
        assert "no row" not in caplog.text
        manager = make_manager(scheduler, tokenizer=byte_tokenizer("[PAD]", "<image>"))
        neighbour = await one(manager)
        assert "2 tokens that are not in the model's vocabulary ('[PAD]', '<image>')" in caplog.text
        for text in ("[PAD]", "a<image>b"):
            with pytest.raises(InvalidRequest, match=f"vocabulary has only {VOCAB_SIZE}"):
                await manager.submit(text, params())
        assert len(scheduler.received) == 1 and manager.num_unfinished == 1
        assert (await neighbour.result()).text == text_of(8)

    run(work())


def test_a_reader_that_leaves_aborts() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.delay_s = 0.01
        manager = make_manager(scheduler)
        generation = await one(manager, max_new_tokens=100)
        outputs = generation.__aiter__()
        await anext(outputs)
        await outputs.aclose()
        assert not scheduler.running and manager.num_unfinished == 0
        waiting = asyncio.create_task((await one(manager, max_new_tokens=100)).result())
        await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not scheduler.running and manager.num_unfinished == 0

    run(work())


def test_late_words_about_a_forgotten_request_are_ignored() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler())
        manager.on_message(text_message("x", rid="gone", token_ids=[1], finish=None, counts=Counts(1, 1)))
        assert manager.num_unfinished == 0

    run(work())


def test_a_dead_engine_ends_everything_with_an_error_and_keeps_what_was_said() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        generation = await one(manager)
        (key,) = scheduler.running
        manager.on_message(text_message(text_of(1), rid=key, token_ids=[0], finish=None, counts=Counts(2, 1)))
        scheduler.dead = True
        call = asyncio.create_task(manager.scheduler_state(60))
        await asyncio.sleep(0)
        manager.fail("the scheduler process died")
        result = await generation.result()
        assert result.text == text_of(1) and result.counts.completion_tokens == 1
        assert isinstance(error_of(result.finish), EngineDead)
        with pytest.raises(EngineDead):
            await call
        for refused in (lambda: manager.submit("hi", params()), manager.flush_cache):
            errors = [(await asyncio.gather(refused(), return_exceptions=True))[0] for _ in range(2)]
            assert all(type(error) is EngineDead for error in errors)
            assert errors[0] is not errors[1], "an error that is raised again keeps the frames of each time"
        assert not manager.is_healthy

    run(work())


def test_health_follows_the_heartbeats() -> None:
    now_s = 100.0

    async def work() -> None:
        nonlocal now_s
        manager = make_manager(FakeScheduler(), watchdog_timeout=5)
        manager.heartbeats = Heartbeats(lambda: now_s)
        assert manager.is_healthy
        now_s += 6
        assert not manager.is_healthy
        manager.on_message(Heartbeat(FakeScheduler().state()))
        assert not manager.is_healthy, "the detokenizer is silent"
        manager.on_message(DetokenizerAlive())
        assert manager.is_healthy

    run(work())


def test_flush_waits_as_long_as_it_is_told_to() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.delay_s = 0.02
        manager = make_manager(scheduler)
        generation = await one(manager)
        with pytest.raises(EngineBusy, match="not flushed: 1 requests"):
            await manager.flush_cache()
        waiting = asyncio.create_task(manager.flush_cache(5.0))
        await generation.result()
        await waiting

    run(work())


def test_draining_refuses_new_requests_only() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler())
        generation = await one(manager)
        manager.draining = True
        with pytest.raises(EngineDead, match="shutting down"):
            await manager.submit("hi", params())
        assert (await generation.result()).text == text_of(8)

    run(work())


def test_sampling_is_checked_against_the_vocabulary() -> None:
    manager = make_manager(FakeScheduler())
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        manager.inputs.make_sampling({"stop_token_ids": [VOCAB_SIZE]})
    with pytest.raises(InvalidRequest, match="logit_bias"):
        manager.inputs.make_sampling({"logit_bias": {str(VOCAB_SIZE): 1.0}})
    with pytest.raises(InvalidRequest, match="top_p") as caught:
        manager.inputs.make_sampling({"top_p": 0})
    assert caught.value.param == "top_p"
    assert manager.inputs.make_sampling({}) == SamplingParams()
    assert manager.inputs.make_sampling({"max_new_tokens": None}).max_new_tokens is None


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    async def work() -> None:
        manager = make_manager(FakeScheduler(), skip_tokenizer_init=True)
        with pytest.raises(InvalidRequest, match="skip-tokenizer-init"):
            await manager.submit("hi", params())
        with pytest.raises(InvalidRequest, match="skip-tokenizer-init"):
            manager.inputs.make_sampling({"stop": "x"})
        generation = await one(manager, [1, 2, 3])
        assert (await generation.result()).token_ids == list(range(8))

    run(work())


def test_a_broken_message_ends_the_requests_that_it_names() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        bad, good = await one(manager), await one(manager)
        manager.on_message(BrokenMessage([bad.key, "gone"], "lost"))
        assert (await bad.result()).finish == AbortFinish("lost", 500, "TercetError")
        assert scheduler.aborted == [bad.key]
        assert manager.num_unfinished == 1
        good.abort()

    run(work())


def test_what_fails_behind_the_scheduler_is_stopped_in_it() -> None:
    async def work() -> None:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        generation = await one(manager)
        (key,) = scheduler.running
        finish = AbortFinish("no text", 500, "TercetError")
        manager.on_message(text_message("", rid=key, token_ids=[], finish=finish, counts=Counts(2)))
        assert (await generation.result()).finish == finish
        assert scheduler.aborted == [key]

    run(work())
