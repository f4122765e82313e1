"""Limits of clients across several HTTP workers: what the workers ask, and what the parent counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeClock
from tercet.managers.calls import Calls
from tercet.srt.entrypoints.key_limits import KeyLimits, Taken
from tercet.srt.entrypoints.worker_limits import AskedLimits, CountedRequests
from tercet.srt.errors import EngineDead
from tercet.srt.worker_messages import LimitCall, LimitRelease


class Worker:
    """A worker and its side in the parent. Each message is handed over at once, unless the parent is `silent`."""

    def __init__(self, limits: KeyLimits, clock: FakeClock) -> None:
        self.silent = False
        self.unread: list[LimitCall | LimitRelease] = []
        self.calls = Calls()
        self.parent = CountedRequests(limits)
        self.limits = AskedLimits(lambda question, reply: self.calls.ask(self, question, reply), self.send, clock)

    def send(self, message: LimitCall | LimitRelease) -> None:
        self.unread.append(message)
        if not self.silent:
            self.read()

    def read(self) -> None:
        """The parent reads all messages."""
        for message in self.unread:
            if isinstance(message, LimitCall):
                self.calls.on_reply(self.parent.take(message))
            else:
                self.parent.release(message.call_id)
        self.unread.clear()


def seen(taken: Taken) -> tuple[Any, ...]:
    """What the client sees of it."""
    error, bucket = taken.refusal, taken.bucket
    return (
        error and (error.message, error.retry_after_s, error.status, error.code),
        bucket and (bucket.capacity, bucket.level, bucket.full_in_s),
    )


@given(
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.integers(1, 90)),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.booleans(), st.floats(0, 20)), max_size=40),
)
def test_workers_together_limit_as_one_process(
    concurrent: int | None, per_minute: int | None, actions: list[tuple[int, str, bool, float]]
) -> None:
    async def run() -> None:
        clock = FakeClock()
        one, shared = KeyLimits(concurrent, per_minute, clock), KeyLimits(concurrent, per_minute, clock)
        workers = [Worker(shared, clock) for _ in range(3)]
        running: list[tuple[Taken, Taken]] = []
        for index, client, ends, pause_s in actions:
            clock.now += pause_s
            if ends and running:
                for taken in running.pop(0):
                    taken.release()
            alone, among = await one.take(client), await workers[index].limits.take(client)
            assert seen(alone) == seen(among)
            if alone.refusal is None:
                running.append((alone, among))

    asyncio.run(run())


def of_one_request(work: Callable[[KeyLimits, Worker], Any]) -> None:
    async def run() -> None:
        clock = FakeClock()
        limits = KeyLimits(1, None, clock)
        await work(limits, Worker(limits, clock))

    asyncio.run(run())


def test_a_dead_worker_has_no_running_requests() -> None:
    async def work(limits: KeyLimits, worker: Worker) -> None:
        assert (await worker.limits.take("a")).refusal is None
        assert limits.take_now("a").refusal is not None
        worker.parent.release_all()
        assert limits.take_now("a").refusal is None

    of_one_request(work)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_request_that_did_not_wait_for_the_answer_does_not_run(is_cancelled: bool) -> None:
    async def work(limits: KeyLimits, worker: Worker) -> None:
        worker.silent = True
        asked = asyncio.ensure_future(worker.limits.take("a"))
        await asyncio.sleep(0)
        if is_cancelled:
            asked.cancel()
        else:
            worker.calls.fail(EngineDead("the parent is silent"))
        with pytest.raises(asyncio.CancelledError if is_cancelled else EngineDead):
            await asked
        worker.read()
        assert limits.take_now("a").refusal is None

    of_one_request(work)


def test_a_refused_request_releases_nothing() -> None:
    async def work(limits: KeyLimits, worker: Worker) -> None:
        first = await worker.limits.take("a")
        refused = await worker.limits.take("a")
        assert refused.refusal is not None
        refused.release()
        assert limits.take_now("a").refusal is not None
        first.release()
        assert limits.take_now("a").refusal is None

    of_one_request(work)
