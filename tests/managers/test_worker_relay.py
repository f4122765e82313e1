"""The samples of HTTP workers in the process that has the engine: with a fake scheduler, and a list for the link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fake_http import FakeScheduler, make_manager
from hypothesis import given
from hypothesis import strategies as st

from tercet.managers.worker_relay import WorkerRelay
from tercet.srt.errors import EngineDead, QueueFull
from tercet.srt.io_struct import AbortFinish, BatchTextOut, LengthFinish, TextOut, joined, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.worker_messages import Recoveries, SampleReq


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.scheduler = FakeScheduler()
        self.manager = make_manager(self.scheduler, **settings)
        self.sent: list[BatchTextOut] = []
        self.recoveries: list[dict[str, int]] = []
        self.relay = WorkerRelay(self.manager, self.send)

    def send(self, message: BatchTextOut | Recoveries) -> None:
        if isinstance(message, BatchTextOut):
            self.sent.append(message)
        else:
            self.recoveries.append(message.by_key)

    def generate(self, key: str, max_new_tokens: int = 3) -> None:
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=max_new_tokens))
        self.relay.generate(SampleReq(key, pack_ids([1, 2, 3]), options, f"name of {key}", 1))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)

    async def idle(self) -> None:
        await self.until(lambda: not self.relay)
        self.relay.flush()

    def outs(self, key: str) -> list[TextOut]:
        return [out for batch in self.sent for out in batch.outs if out.rid == key]

    def end(self, key: str) -> TextOut:
        return joined(self.outs(key))


def run(work: Callable[[Rig], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def body() -> None:
        await work(Rig(**settings))

    asyncio.run(body())


@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6), step=st.integers(1, 3))
def test_a_worker_gets_each_output_of_its_samples_once(lengths: list[int], step: int) -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.step = step
        for index, length in enumerate(lengths):
            rig.generate(f"7-{index}", length)
        await rig.idle()
        for index, length in enumerate(lengths):
            end = rig.end(f"7-{index}")
            assert end.token_ids == list(range(length)) and end.finish == LengthFinish(length)
        assert not rig.manager.num_unfinished

    run(work)


def test_the_outputs_of_one_turn_are_one_message() -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.mute = True
        for key in ("7-0", "7-1"):
            rig.generate(key)
        rig.manager.fail("gone")
        await rig.until(lambda: bool(rig.sent))
        assert [[out.rid for out in batch.outs] for batch in rig.sent] == [["7-0", "7-1"]]

    run(work)


def test_a_sample_has_the_names_that_its_client_knows() -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.mute = True
        rig.generate("7-0")
        (sample,) = rig.manager.live_samples()
        assert (sample.key, sample.rid, sample.index) == ("7-0", "name of 7-0", 1)
        assert not rig.manager.abort("name of 7-0"), "only its worker finds it by its name"
        rig.relay.close()

    run(work)


def test_an_abort_is_answered_with_the_tokens_so_far() -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.gate = True
        rig.generate("7-0")
        rig.scheduler.release()
        await rig.until(lambda: bool(rig.sent))
        rig.relay.abort("8-0")
        assert not rig.scheduler.aborted
        rig.relay.abort("7-0")
        await rig.idle()
        end = rig.end("7-0")
        assert end.token_ids == [0] and isinstance(end.finish, AbortFinish) and end.finish.status_code is None

    run(work)


def test_a_new_engine_gets_the_samples_with_their_tokens() -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.gate = True
        rig.generate("7-0")
        rig.scheduler.release()
        await rig.until(lambda: bool(rig.sent))
        rig.manager.on_death(None)
        rig.generate("7-1")  # it waits
        assert len(rig.scheduler.received) == 1
        rig.scheduler.gate = False
        rig.manager.resume(rig.scheduler, rig.manager.facts)
        await rig.idle()
        resumed = rig.scheduler.received[1].resumed
        assert resumed is not None and resumed.output_ids == [0]
        assert rig.recoveries and all(one == {"7-0": 1} for one in rig.recoveries)
        assert rig.end("7-0").token_ids == rig.end("7-1").token_ids == [0, 1, 2]

    run(work)


def test_what_the_engine_cannot_take_is_refused() -> None:
    async def work(rig: Rig) -> None:
        rig.manager.on_death(None)
        rig.generate("7-0")
        rig.generate("7-1")
        rig.manager.fail("the end")
        rig.generate("7-2")
        await rig.until(lambda: len(rig.sent) > 0)
        finishes = [rig.end(key).finish for key in ("7-0", "7-1", "7-2")]
        kinds = [finish.err_type for finish in finishes if isinstance(finish, AbortFinish)]
        assert kinds == [EngineDead.__name__, QueueFull.__name__, EngineDead.__name__]

    run(work, max_queued_requests=1)


def test_the_samples_of_a_dead_worker_end_in_the_engine() -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.mute = True
        rig.generate("7-0")
        rig.generate("7-1")
        other = WorkerRelay(rig.manager, rig.send)
        assert rig.relay.close() == 2 and other.close() == 0
        assert rig.scheduler.aborted == ["7-0", "7-1"]
        await asyncio.sleep(0)
        assert not rig.sent and not rig.manager.num_unfinished

    run(work)


def test_a_broken_message_ends_what_it_names() -> None:
    async def work(rig: Rig) -> None:
        rig.scheduler.mute = True
        rig.generate("7-0")
        rig.relay.fail(["7-0", "7-1"], "broken")
        await rig.until(lambda: len(rig.sent) == 2)
        for key in ("7-0", "7-1"):
            finish = rig.end(key).finish
            assert isinstance(finish, AbortFinish) and finish.status_code == 500 and finish.message == "broken"

    run(work)
