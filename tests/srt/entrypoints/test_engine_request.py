"""The calls of an Engine on a scheduler without a process: how much of them it knows of at a time."""

from __future__ import annotations

import asyncio
import math
from collections import ChainMap, UserDict
from collections.abc import Coroutine
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from fake_http import FakeScheduler, make_manager, text_of
from patience import PATIENCE_S

from tercet.srt.entrypoints.engine import _body
from tercet.srt.entrypoints.engine_request import EngineRequest, make_sample_limit
from tercet.srt.entrypoints.routing import Server
from tercet.srt.errors import InvalidRequest
from tercet.srt.io_struct import AbortFinish, BatchTextOut, ToScheduler


class CountingScheduler(FakeScheduler):
    """Notes how many samples it had at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def send(self, message: ToScheduler) -> None:
        super().send(message)
        self.peak = max(self.peak, len(self.running))


class Calls:
    """The calls of one Engine."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = CountingScheduler()
        self.manager = make_manager(self.scheduler, **settings)
        self._server = Server(self.manager, "0")
        self._sample_limit = make_sample_limit(self.manager.server_args)

    def call(self, sampling: dict[str, Any], **fields: Any) -> EngineRequest:
        return EngineRequest(self._server, self._sample_limit, _body(None, sampling, fields))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(work, PATIENCE_S))
        assert self.manager.num_unfinished == 0 and not self.scheduler.running


@pytest.mark.parametrize("n", [1, 3, 20])
def test_a_call_never_overfills_the_queue(n: int) -> None:
    calls = Calls(max_queued_requests=8)

    async def work() -> None:
        sampling = {"max_new_tokens": 2, "n": n}
        answers = await calls.call(sampling, input_ids=[[i] for i in range(30)]).run(False)
        assert [answer["text"] for answer in answers] == [text_of(2)] * 30 * n
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1] * 30 * n

    calls.run(work())
    assert calls.scheduler.peak == 8
    first_ids = [ids[0] for ids in calls.scheduler.prompts()]
    assert first_ids == sorted(first_ids)


def test_calls_share_the_room_and_a_short_one_does_not_wait_for_a_long_one() -> None:
    calls = Calls(max_queued_requests=4)

    async def stream(request: EngineRequest) -> list[int]:
        finished = []
        while (answer := await request.next()) is not None:
            if answer["meta_info"]["finish_reason"] is not None:
                finished.append(answer["index"])
        return finished

    async def work() -> None:
        sampling = {"max_new_tokens": 2}
        long = asyncio.create_task(calls.call(sampling, input_ids=[[1]] * 200).run(False))
        streamed = asyncio.create_task(stream(calls.call(sampling, input_ids=[[2]] * 20)))
        short = await calls.call(sampling, input_ids=[3]).run(False)
        assert short["text"] == text_of(2)
        assert len(calls.scheduler.received) < 50
        assert sorted(await streamed) == list(range(20))
        assert len(await long) == 200

    calls.run(work())
    assert calls.scheduler.peak == 4


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_full_queue_is_waited_for(is_aborted: bool) -> None:
    """It may hold samples that were closed here, until the scheduler has heard of that."""
    calls = Calls()
    calls.scheduler.fail = (0, AbortFinish("the queue is full", 503, "QueueFull"))

    async def work() -> None:
        call = asyncio.create_task(calls.call({"max_new_tokens": 2}, input_ids=[1], rid="mine").run(False))
        while len(calls.scheduler.received) < 3:
            await asyncio.sleep(0.001)
        if is_aborted:
            while calls.scheduler.running:
                await asyncio.sleep(0)
            assert calls.manager.abort("mine")
            assert (await call)["meta_info"]["finish_reason"]["type"] == "abort"
            assert not calls.scheduler.aborted
        else:
            calls.scheduler.fail = None
            assert (await call)["text"] == text_of(2)

    calls.run(work())


def test_an_abort_ends_what_waits_for_room() -> None:
    calls = Calls(max_queued_requests=1)
    calls.scheduler.mute = True

    async def work() -> None:
        first = asyncio.create_task(calls.call({}, input_ids=[1], rid="first").run(False))
        while not calls.scheduler.received:
            await asyncio.sleep(0)
        second = asyncio.create_task(calls.call({}, input_ids=[[2], [3]], rid="second").run(False))
        await asyncio.sleep(0.01)
        assert calls.manager.num_unfinished == 3
        assert calls.manager.abort("second")
        for answer in await second:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(calls.scheduler.received) == 1 and not calls.scheduler.aborted
        calls.manager.abort("first")
        await first

    calls.run(work())


def test_a_sample_that_ended_while_it_waited_takes_no_room() -> None:
    """Others of its prompt still run, so the wait goes on."""
    calls = Calls(max_queued_requests=2)
    calls.scheduler.mute = calls.scheduler.dead = True

    async def work() -> None:
        call = asyncio.create_task(calls.call({"n": 4}, input_ids=[1], rid="mine").run(False))
        while len(calls.scheduler.received) < 2:
            await asyncio.sleep(0)
        calls.manager.abort("mine")
        for request in calls.scheduler.received:
            out = calls.scheduler._out(request, 0, 0, AbortFinish("aborted by the client"))
            calls.manager.on_message(BatchTextOut([out]))
            for _ in range(5):  # the call goes on
                await asyncio.sleep(0)
        assert len(await call) == 4
        assert calls._sample_limit._value == 2

    calls.run(work())


def test_the_engines_death_ends_what_waits_for_room() -> None:
    calls = Calls(max_queued_requests=1)
    calls.scheduler.mute = True

    async def work() -> None:
        request = calls.call({}, input_ids=[[1], [2]])
        call = asyncio.create_task(request.run(False))
        while not calls.scheduler.received:
            await asyncio.sleep(0)
        calls.manager.fail("the scheduler process died")
        with pytest.raises(Exception, match="scheduler process died"):
            await call
        calls.scheduler.running.clear()

    calls.run(work())


def test_a_list_may_have_any_length() -> None:
    count = 100_001
    body = _body(None, {"max_new_tokens": 1}, {"input_ids": [[1]] * count})
    assert body.input_ids is not None and len(body.input_ids) == count
    one_each = _body(None, [{"max_new_tokens": 1}] * count, {"input_ids": np.ones((count, 1), np.int32)})
    assert one_each.input_ids == body.input_ids


def test_more_than_http_takes_in_one_request() -> None:
    calls = Calls()

    async def work() -> None:
        assert len(await calls.call({"max_new_tokens": 1, "n": 3}, input_ids=[[1]] * 1500).run(False)) == 4500

    calls.run(work())


def test_a_late_prompt_that_cannot_be_ends_the_call() -> None:
    calls = Calls(max_queued_requests=2)

    async def work() -> None:
        with pytest.raises(InvalidRequest) as caught:
            await calls.call({}, input_ids=[[1]] * 10 + [[1000]] + [[1]] * 10).run(False)
        assert caught.value.param == "input_ids[10]"
        assert len(calls.scheduler.received) <= 12

    calls.run(work())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
@pytest.mark.parametrize("field", ["temperature", "max_new_tokens", "top_k"])
def test_numbers_that_json_does_not_have_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _body("a", {field: value}, {})
    assert caught.value.param == f"sampling_params.{field}"
    assert "finite" in caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        _body(["a", "b"], [{}, {"logit_bias": {5: value}}], {})
    assert caught.value.param == "sampling_params[1].logit_bias.5"


def test_numbers_of_more_than_64_bits_are_refused_by_name() -> None:
    for number in (2**64, -(2**63) - 1, 10**5000):  # pytest cannot show the last one
        for sampling, field in (({"n": number}, "n"), ({"json_schema": {"maximum": number}}, "json_schema.maximum")):
            with pytest.raises(InvalidRequest, match="at most 64 bits") as caught:
                _body("a", sampling, {})
            assert caught.value.param == f"sampling_params.{field}"


def test_any_mapping_is_an_object() -> None:
    for sampling in (UserDict(n=2), ChainMap({"n": 2}), MappingProxyType({"n": 2})):
        assert _body("a", sampling, {}).sampling_params == _body("a", {"n": 2}, {}).sampling_params
    nested = {"json_schema": MappingProxyType({"type": "object"})}
    assert _body("a", nested, {}).sampling_params == _body("a", {"json_schema": {"type": "object"}}, {}).sampling_params


def test_text_that_is_not_unicode_is_refused_by_name() -> None:
    for field, given in (("rid", "\ud800"), ("cache_salt", ["a", "\ud800"]), ("sampling_params", {"stop": "\ud800"})):
        sampling = given if field == "sampling_params" else None
        with pytest.raises(InvalidRequest, match="Unicode") as caught:
            _body("a", sampling, {} if sampling else {field: given})
        assert (caught.value.param or "").startswith(field)


def test_a_stream_that_could_not_be_opened_has_ended() -> None:
    calls = Calls()

    async def work() -> None:
        request = calls.call({}, input_ids=[[1], [1000]])
        with pytest.raises(InvalidRequest):
            await request.next()
        assert await request.next() is None
        assert not calls.scheduler.received

    calls.run(work())


def test_two_readers_open_a_stream_once() -> None:
    calls = Calls()

    async def work() -> None:
        request = calls.call({"max_new_tokens": 2}, input_ids=[1])
        first, second = await asyncio.gather(request.next(), request.next())
        assert first is not None and second is not None
        assert [first["text"], second["text"]] == [text_of(1), text_of(2)]

    calls.run(work())
