"""Processes that do not answer: HTTP workers as their parent sees them, and the parent as a worker sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_http import FakeScheduler, make_manager
from patience import PATIENCE_S

from tercet.srt.entrypoints import http_workers, worker_link
from tercet.srt.entrypoints.endpoints import ENDPOINTS
from tercet.srt.entrypoints.forwarded import ParentEndpoints
from tercet.srt.entrypoints.http_server import make_server
from tercet.srt.entrypoints.http_workers import HttpWorkers
from tercet.srt.entrypoints.watchdog import HangDetector
from tercet.srt.entrypoints.worker_link import ServedEngine, Worker
from tercet.srt.errors import EngineDead
from tercet.srt.ipc import RunDir
from tercet.srt.server_args import ServerArgs


class StoppedChild:
    """A process that never becomes ready."""

    started = 0

    def __init__(self) -> None:
        StoppedChild.started += 1
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    def start(cls, *_: object, **__: object) -> StoppedChild:
        return cls()

    def launch(self, *_: object) -> StoppedChild:
        return self

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("the http_worker process died (signal 9)")

    ask_to_stop = kill


def test_a_worker_that_hangs_while_it_starts_again_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(http_workers, "ChildProcess", StoppedChild)
        args = ServerArgs(model_path="m", tokenizer_worker_num=2, engine_restarts=3)
        object.__setattr__(args, "watchdog_timeout", 0.02)  # no user may set it so low
        workers = HttpWorkers(args, [socket.socket()], "m")
        workers._engine = object()  # type: ignore[assignment]
        workers._workers[0].child.kill()
        message = await asyncio.wait_for(workers.failed, PATIENCE_S)
        assert "--engine-restarts 3 is used up" in message and StoppedChild.started == 4
        workers._engine = None
        await workers.stop()

    asyncio.run(scenario())


def test_a_worker_whose_link_cannot_be_made_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(http_workers, "ChildProcess", StoppedChild)
        workers = HttpWorkers(ServerArgs(model_path="m", tokenizer_worker_num=2), [], "m")
        (workers._run_dir.path / "0-scheduler").mkdir()  # where the socket would be
        children: list[StoppedChild] = []
        monkeypatch.setattr(StoppedChild, "launch", lambda self, *_: children.append(self) or self)
        with pytest.raises(OSError, match="Address already in use"):
            workers._start(socket.socket())
        (child,) = children
        assert child.ended.done()
        await workers.stop()

    asyncio.run(scenario())


@contextmanager
def silent_worker(tmp_path: Path) -> Iterator[Worker]:
    """The parent's side of a worker that is ready and then stopped."""
    context: zmq.Context[Any] = zmq.Context()
    worker = Worker(None, None, context, RunDir(tmp_path, 1), HangDetector(300.0, None))  # type: ignore[arg-type]
    assert worker.silent_s == 0
    manager = make_manager(FakeScheduler())
    server = make_server(manager)
    worker.open(ServedEngine(manager, server, ParentEndpoints(server, [])), lambda: None)
    yield worker
    worker.close()
    context.destroy(linger=0)


def test_a_worker_that_is_ready_and_tells_nothing_is_silent(tmp_path: Path) -> None:
    async def scenario() -> None:
        with silent_worker(tmp_path) as worker:
            await asyncio.sleep(0.001)
            assert worker.silent_s > 0

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["mine", None])
@pytest.mark.parametrize("has_other", [True, False])
def test_an_abort_does_not_wait_for_a_stopped_worker(
    name: str | None, has_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        async def abort(self, name: str | None) -> bool:
            return has_other

    async def scenario() -> None:
        monkeypatch.setattr(worker_link, "ANSWER_TIMEOUT_S", 0.01)
        monkeypatch.setattr(http_workers, "ChildProcess", StoppedChild)
        workers = HttpWorkers(ServerArgs(model_path="m", tokenizer_worker_num=2), [], "m")
        with silent_worker(tmp_path) as worker:
            workers._engine = worker._engine
            workers._workers = [worker, Other()]  # type: ignore[list-item]
            aborted = asyncio.wait_for(workers.abort(name), PATIENCE_S)
            if has_other:
                assert await aborted
            else:
                with pytest.raises(EngineDead, match="does not answer"):
                    await aborted
            workers._engine, workers._workers = None, []
            await workers.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/update_weights_from_disk"])
def test_a_change_is_answered_when_each_worker_that_answers_knows_of_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Other:
        is_open = False

        async def catch_up(self) -> None:
            await asyncio.sleep(0.001)
            done.append("known")

    async def change(server: Any, request: Any, body: Any) -> str:
        done.append("changed")
        return "response"

    async def scenario() -> None:
        monkeypatch.setattr(worker_link, "ANSWER_TIMEOUT_S", 0.01)
        monkeypatch.setattr(http_workers, "ChildProcess", StoppedChild)
        workers = HttpWorkers(ServerArgs(model_path="m", tokenizer_worker_num=2), [], "m")
        (endpoint,) = (dataclasses.replace(one, handler=change) for one in ENDPOINTS if one.path == path)
        with silent_worker(tmp_path) as worker:
            workers._engine = worker._engine
            workers._workers = [worker, Other()]  # type: ignore[list-item]
            handler: Any = http_workers._with_workers(endpoint, workers).handler
            response = await asyncio.wait_for(handler(None, None, None), PATIENCE_S)
            workers._engine, workers._workers = None, []
            await workers.stop()
        assert response == "response" and done == ["changed", "known"]

    asyncio.run(scenario())
