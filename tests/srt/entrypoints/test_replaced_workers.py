"""HTTP workers that are started again while other things happen: news of the engine, a shutdown, another failure."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_http import FakeScheduler, make_manager

from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.entrypoints import http_workers, restarts
from tercet.srt.entrypoints.forwarded import ParentEndpoints
from tercet.srt.entrypoints.http_server import make_server
from tercet.srt.entrypoints.http_workers import HttpWorkers
from tercet.srt.entrypoints.restarts import retry_pause_s
from tercet.srt.entrypoints.worker_link import ServedEngine, Worker
from tercet.srt.server_args import ServerArgs
from tercet.srt.worker_messages import EngineNews


class Child:
    """A process that is ready and dies when a test says so."""

    started: list[Child]
    error: OSError | None

    def __init__(self) -> None:
        if Child.error is not None:
            raise Child.error
        Child.started.append(self)
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    def start(cls, *_: object, **__: object) -> Child:
        return cls()

    def launch(self, *_: object) -> Child:
        return self

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("the http_worker process died (signal 9)")

    ask_to_stop = kill


class Told:
    """A link to a worker that keeps the news."""

    def __init__(self) -> None:
        self.stalls: list[str | None] = []

    def send(self, message: object) -> None:
        if isinstance(message, EngineNews):
            self.stalls.append(message.stall)

    def close(self) -> None: ...


class Rig:
    def __init__(self) -> None:
        args = ServerArgs(model_path="m", tokenizer_worker_num=2, engine_restarts=9)
        self.workers = HttpWorkers(args, [socket.socket(), socket.socket()], "m")
        self.manager: TokenizerManager = make_manager(FakeScheduler())
        server = make_server(self.manager)
        engine = self.workers._engine = ServedEngine(self.manager, server, ParentEndpoints(server, []))
        for worker in self.workers._workers:
            worker.open(engine, self.workers.tell_news)
        self.told = [self.watch(index) for index in range(2)]
        self.workers.tell_news()
        self.manager.on_stall.add(self.workers.tell_news)

    def watch(self, index: int) -> Told:
        told = Told()
        self.workers._workers[index].sender = told  # type: ignore[assignment]
        return told


def run(work: Callable[[Rig], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        rig = Rig()
        await work(rig)
        await rig.workers.stop()
        assert all(child.ended.done() for child in Child.started)

    monkeypatch.setattr(restarts, "_RETRY_S", 0.0)
    monkeypatch.setattr(http_workers, "ChildProcess", Child)
    monkeypatch.setattr(Child, "started", [], raising=False)
    monkeypatch.setattr(Child, "error", None, raising=False)
    asyncio.run(body())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_worker_that_comes_between_two_restarts_of_the_engine_hears_of_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others were told of the first restart, and not of its end."""

    async def work(rig: Rig) -> None:
        Child.started[0].kill()
        await turns()
        rig.manager.on_death(None)
        rig.manager.resume(FakeScheduler(), rig.manager.facts)
        new = rig.watch(1)
        Child.started[2].ready.set_result(None)
        await turns()
        rig.manager.on_death(None)
        assert new.stalls[-1] == rig.told[1].stalls[-1] == "restarting"
        assert None in new.stalls

    run(work, monkeypatch)


def test_a_worker_is_started_again_after_its_folder_was_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        shutil.rmtree(rig.workers._run_dir.path)
        Child.started[0].kill()
        await turns()
        Child.started[2].ready.set_result(None)
        await turns()
        assert [worker.child for worker in rig.workers._workers] == Child.started[1:]
        assert all(worker.is_open for worker in rig.workers._workers)

    run(work, monkeypatch)


def test_no_worker_is_started_during_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        Child.started[0].ended.set_result("died")
        await asyncio.sleep(0)  # its end is known, and the next one is about to be started
        assert len(Child.started) == 2 and rig.workers._tasks
        await rig.workers.stop()
        assert len(Child.started) == 2

    run(work, monkeypatch)


def test_two_workers_that_cannot_be_started_again_are_one_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(rig: Rig) -> None:
        unraised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unraised.append(context))
        Child.error = OSError(24, "Too many open files")
        for child in Child.started[:2]:
            child.kill()
        failure = await rig.workers.failed
        await turns()
        assert failure == "it could not be started: Too many open files; --engine-restarts 9 is used up"
        assert failure in caplog.text and not rig.workers._tasks and not unraised

    run(work, monkeypatch)


@pytest.mark.parametrize("failure", ["process", "link"])
def test_a_worker_that_cannot_be_started_for_a_moment_is_started_then(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """There are too many open files when the process or the links to it are made."""

    def no_worker(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def work(rig: Rig) -> None:
        if failure == "process":
            Child.error = OSError(24, "Too many open files")
        else:
            monkeypatch.setattr(http_workers, "Worker", no_worker)
        Child.started[0].kill()
        await turns()
        assert rig.workers._num_failed_starts
        Child.error = None
        monkeypatch.setattr(http_workers, "Worker", Worker)
        await turns()
        Child.started[-1].ready.set_result(None)
        await turns()
        assert all(worker.is_open for worker in rig.workers._workers) and len(rig.workers._workers) == 2
        assert all(child.ended.done() for child in (Child.started[0], *Child.started[2:-1]))

    run(work, monkeypatch)


def test_a_worker_that_dies_when_it_is_ready_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        unraised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unraised.append(context))
        Child.started[0].kill()
        await turns()
        died = rig.workers._workers[1]
        Child.started[2].ready.set_result(None)
        Child.started[2].kill()
        await turns()
        assert len(Child.started) == 4 and not died.is_open and not unraised
        assert [worker.child for worker in rig.workers._workers] == [Child.started[1], Child.started[3]]

    run(work, monkeypatch)


def test_starts_that_fail_are_tried_again_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate file that is being replaced is whole a moment later."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def sleep_at_once(delay: float) -> None:
        pauses.append(delay)
        await sleep(0)

    async def some_turns() -> None:
        for _ in range(5):
            await sleep(0)

    async def work(rig: Rig) -> None:
        monkeypatch.setattr(restarts, "_RETRY_S", 1.0)
        monkeypatch.setattr(asyncio, "sleep", sleep_at_once)
        Child.started[0].kill()
        for number in range(2, 5):
            await some_turns()
            Child.started[number].ready.set_exception(ValueError("--ssl-certfile: cannot load c.pem"))
            Child.started[number].kill()
        await some_turns()
        Child.started[5].ready.set_result(None)
        await some_turns()
        Child.started[5].kill()
        await some_turns()
        assert len(Child.started) == 7 and pauses == [0, 1, 2, 4, 0]

    run(work, monkeypatch)


def test_the_pause_after_failed_starts_is_bounded() -> None:
    assert [retry_pause_s(count) for count in (0, 1, 2, 5, 6, 7, 10_000)] == [0, 1, 2, 16, 32, 32, 32]
