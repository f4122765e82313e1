"""An abort that no engine answers: the answer has the whole text of its tokens, as an engine would have sent it."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest
from fake_http import FakeScheduler, byte_tokenizer, make_manager
from hypothesis import given
from hypothesis import strategies as st

from tercet.managers import generation as generation_module
from tercet.managers.detokenizer_manager import DetokenizerManager
from tercet.managers.request_registry import Prompt
from tercet.managers.worker_relay import WorkerRelay
from tercet.srt.io_struct import (
    AbortFinish,
    BatchTextOut,
    BatchTokenOut,
    Counts,
    DecodeOptions,
    TextOut,
    TokenOut,
    joined,
    pack_ids,
)
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.worker_messages import Recoveries, SampleReq

TOKENIZER = byte_tokenizer()
SMILE = list("🙂".encode())
STOP = SamplingParams(max_new_tokens=20, stop=["<stop>"])
ENDS = ("before", "during", "unanswered")
"""When the abort comes: before the engine's death or during the restart. Or the engine lives, and never answers."""


def outputs(key: str, ids: list[int], sampling: SamplingParams) -> list[TokenOut]:
    """One output for each token."""
    options = DecodeOptions.of(RequestOptions(sampling=sampling))
    return [
        TokenOut(rid=key, token_ids=[token], finish=None, counts=Counts(2, num), options=options if num == 1 else None)
        for num, token in enumerate(ids, 1)
    ]


def text_of_an_engine(ids: list[int], sampling: SamplingParams) -> str:
    """The text if an engine had ended the request after these tokens."""
    detokenizer = DetokenizerManager(TOKENIZER)
    end = TokenOut(rid="0", token_ids=[], finish=AbortFinish("aborted"), counts=Counts(2, len(ids)))
    batch = BatchTokenOut([*outputs("0", ids, sampling), end])
    return joined(detokenizer.process(batch).outs).text


async def aborted(when: str, ids: list[int], sampling: SamplingParams) -> TextOut:
    scheduler = FakeScheduler()
    scheduler.mute = scheduler.dead = True
    manager = make_manager(scheduler)
    (generation,) = await manager.submit("hi", RequestOptions(sampling=sampling, stream=True))
    manager.on_message(DetokenizerManager(TOKENIZER).process(BatchTokenOut(outputs(generation.key, ids, sampling))))
    if when == "during":
        manager.on_death(None)
    generation.abort()
    if when == "before":
        manager.on_death(None)
    return await generation.result()


@given(
    st.sampled_from(ENDS),
    st.lists(st.sampled_from([*b"ab<", *SMILE, 256]), max_size=12),
    st.lists(st.sampled_from(["<a", "ab<b", "🙂b"]), max_size=2, unique=True),
    st.booleans(),
)
def test_no_text_is_lost(when: str, ids: list[int], stops: list[str], keep: bool) -> None:
    sampling = SamplingParams(max_new_tokens=20, stop=stops, no_stop_trim=keep)
    with mock.patch.object(generation_module, "ABORT_TIMEOUT_S", 0.0):
        out = asyncio.run(aborted(when, ids, sampling))
    assert out.finish == AbortFinish("aborted by the client")
    assert out.token_ids == ids and out.counts.completion_tokens == len(ids)
    assert out.text == text_of_an_engine(ids, sampling)


HELD = [([97, *SMILE[:3]], "a\ufffd"), ([*b"no <st"], "no <st")]
"""Tokens and their text, of which the detokenizer holds back the end."""


def held(key: str, ids: list[int]) -> BatchTextOut:
    return DetokenizerManager(TOKENIZER).process(BatchTokenOut(outputs(key, ids, STOP)))


@pytest.mark.parametrize(("ids", "text"), HELD)
def test_a_worker_gets_the_held_text_too(ids: list[int], text: str) -> None:
    """The samples of an HTTP worker end in the process that has the engine."""

    async def work() -> TextOut:
        scheduler = FakeScheduler()
        scheduler.mute = True
        manager = make_manager(scheduler)
        sent: list[BatchTextOut] = []

        def send(message: BatchTextOut | Recoveries) -> None:
            if isinstance(message, BatchTextOut):
                sent.append(message)

        relay = WorkerRelay(manager, send)
        relay.generate(SampleReq("7-0", pack_ids([1, 2]), RequestOptions(sampling=STOP, stream=True), "mine", 0))
        manager.on_message(held("7-0", ids))
        manager.on_death(None)
        relay.abort("7-0")
        relay.flush()
        return joined([out for message in sent for out in message.outs])

    out = asyncio.run(work())
    assert isinstance(out.finish, AbortFinish) and out.token_ids == ids and out.text == text


@pytest.mark.parametrize(("ids", "text"), HELD)
def test_a_stream_of_the_server_before_has_the_held_text(ids: list[int], text: str) -> None:
    """It is aborted before its client has asked this server for it."""

    async def work() -> TextOut:
        manager = make_manager(FakeScheduler())
        (prompt,) = manager.open([Prompt(content=[1, 2], options=RequestOptions(sampling=STOP, stream=True))]).prompts
        (generation,) = prompt.generations
        for out in held(generation.key, ids).outs:
            generation.restore(out, 0, None)
        generation.abort()
        return await generation.result()

    out = asyncio.run(work())
    assert isinstance(out.finish, AbortFinish) and out.token_ids == ids and out.text == text
