"""The engine is restarted in place: real processes with made-up tokens. tests/e2e has the real model."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import shutil
import signal
import time
import types
from pathlib import Path
from typing import Any

import fake_child
import pytest
from patience import PATIENCE_S
from toy_engine import ServerProcess, Stream, is_gone, text_of, toy_args, toy_flags

from tercet.srt.entrypoints import engine_core, restarts, sse
from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.entrypoints.engine_life import EngineLife
from tercet.srt.errors import EngineDead
from tercet.srt.io_struct import LengthFinish
from tercet.srt.ipc import RunDir
from tercet.srt.machine.oom import num_oom_kills
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(300)

TOKENS = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 150}}
CACHE = "XDG_CACHE_HOME"


@pytest.fixture
def run_dirs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setenv(CACHE, str(tmp_path_factory.mktemp("c")))
    return path


def options(max_new_tokens: int) -> RequestOptions:
    return RequestOptions(sampling=SamplingParams(max_new_tokens=max_new_tokens), stream=True)


async def _start(folder: Path, **settings: Any) -> EngineCore:
    return await EngineCore.start(dataclasses.replace(toy_args(folder), **settings), child_module=fake_child.MODULE)


def test_the_machine_tells_about_kills_for_memory() -> None:
    count = num_oom_kills()
    assert count is None or count >= 0


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_streams_go_on_and_nothing_is_left(run_dirs: Path, tmp_path: Path, role: str) -> None:
    with ServerProcess(run_dirs, [*toy_flags(tmp_path), "--port", "0"]) as server, server.ready().client() as client:
        pids = [*server.children.values()]
        streams = [Stream(server, "/generate", TOKENS) for _ in range(8)]
        assert all(stream.begun.wait(PATIENCE_S) for stream in streams)
        os.kill(server.children[role], signal.SIGKILL)
        assert server.logged("restarting it (1 of 3)")
        health = client.get("/health").json()["status"]
        assert health == "restarting" or server.logged("The engine runs again")
        new = Stream(server, "/generate", TOKENS)
        for stream in [*streams, new]:
            last = json.loads(stream.wait().data[-2])
            assert (last["text"], last["output_ids"]) == (text_of(150), list(range(100, 250)))
            assert last["meta_info"]["num_recoveries"] == (stream is not new)
        assert all(stream.comments[0] == ": restarting" for stream in streams)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/ready").status_code == client.post("/flush_cache").status_code == 200
        info = client.get("/server_info").json()
        assert (info["num_engine_restarts"], info["num_resumed_samples"], info["status"]) == (1, 8, "ready")
        assert all(is_gone(pid) for pid in pids)
        assert len(os.listdir(run_dirs)) == 1
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert os.listdir(run_dirs) == []
    assert "Traceback" not in server.log


def test_when_the_restarts_are_used_up_the_server_fails(run_dirs: Path, tmp_path: Path) -> None:
    flags = [*toy_flags(tmp_path), "--port", "0", "--engine-restarts", "1"]
    with ServerProcess(run_dirs, flags) as server:
        stream = Stream(server.ready(), "/generate", TOKENS)
        assert stream.begun.wait(PATIENCE_S)
        os.kill(server.children["scheduler"], signal.SIGKILL)
        assert server.logged("The engine runs again")
        os.kill(server.children["scheduler"], signal.SIGKILL)
        message = json.loads(stream.wait().data[-2])["error"]["message"]
        assert "signal 9" in message and "--engine-restarts 1 is used up" in message
        assert server.exit_code() == 1
    assert os.listdir(run_dirs) == []


def test_a_drain_waits_for_the_restart(run_dirs: Path, tmp_path: Path) -> None:
    with ServerProcess(run_dirs, [*toy_flags(tmp_path), "--port", "0"]) as server:
        stream = Stream(server.ready(), "/generate", TOKENS)
        assert stream.begun.wait(PATIENCE_S)
        os.kill(server.children["scheduler"], signal.SIGKILL)
        assert server.logged("restarting it")
        server.signal(signal.SIGTERM)
        assert json.loads(stream.wait().data[-2])["text"] == text_of(150)
        assert server.exit_code() == 0
    assert os.listdir(run_dirs) == []


def test_an_engine_that_cannot_start_again_has_died(
    run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        core = await _start(tmp_path, engine_restarts=2)
        core._spares["scheduler"].kill()
        await core._spares["scheduler"].ended
        (sample,) = await core.tokenizer_manager.submit([1], options(400))
        monkeypatch.setattr(restarts, "_RETRY_S", 0.0)
        monkeypatch.setenv("FAKE_CHILD", "bug")
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        out = await asyncio.wait_for(sample.result(), PATIENCE_S)
        assert out.finish is not None and "something broke" in out.finish.message
        assert "could not be restarted" in await core.died
        with pytest.raises(EngineDead):
            await core.tokenizer_manager.submit([1], options(1))
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_an_engine_that_has_lost_its_gpu_does_not_go_on_on_the_cpu(
    run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setenv("FAKE_CHILD", "gpu")
        core = await _start(tmp_path, engine_restarts=2, device="auto")
        core._spares["scheduler"].kill()
        await core._spares["scheduler"].ended
        monkeypatch.setattr(restarts, "_RETRY_S", 0.0)
        monkeypatch.setenv("FAKE_CHILD", "")
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        assert "could not be restarted: --device cuda needs a GPU" in await asyncio.wait_for(core.died, PATIENCE_S)
        await core.stop()

    asyncio.run(scenario())


def test_comments_go_on_until_tokens_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs again, but its first steps take long."""
    monkeypatch.setattr(sse, "_COMMENT_INTERVAL_S", 0.0)
    callbacks: set[Any] = set()
    manager: Any = types.SimpleNamespace(on_stall=callbacks, stall=None)
    sent: list[bytes] = []
    enough = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        manager.stall = None
        if sent.count(b": restarting\n\n") == 5:
            enough.set()

    async def parts() -> Any:
        yield b"first"
        manager.stall = "restarting"
        for callback in callbacks:
            callback()
        await enough.wait()
        enough.clear()
        sent.clear()
        yield b"token"
        await enough.wait()
        yield b"another"

    async def scenario() -> None:
        stream = sse.EventStream(parts(), manager, lambda: None)
        await asyncio.wait_for(stream(None, None, send), PATIENCE_S)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert [one for one in sent if not one.startswith(b":")] == [b"token", b"another", b""]


def test_a_restart_that_fails_is_tried_again(run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory or disk space may be short for a moment, and the process says so. The old files may be stuck, too."""
    folders: list[RunDir] = []
    next_life = RunDir.next_life

    def next_life_later(run_dir: RunDir) -> RunDir:
        folders.append(run_dir)
        if len(folders) == 1:
            raise OSError(errno.EIO, "the disk does not answer")
        return next_life(run_dir)

    monkeypatch.setattr(RunDir, "next_life", next_life_later)

    async def scenario() -> None:
        core = await _start(tmp_path)
        core._spares["scheduler"].kill()
        await core._spares["scheduler"].ended
        (sample,) = await core.tokenizer_manager.submit([1], options(100))
        monkeypatch.setattr(restarts, "_RETRY_S", 0.0)
        attempts = []
        start = EngineLife.start.__func__  # type: ignore[attr-defined]

        async def start_later(cls: Any, *args: Any, **named: Any) -> EngineLife:
            attempts.append(named)
            monkeypatch.setenv("FAKE_CHILD", "bug" if len(attempts) == 1 else "")
            life: EngineLife = await start(cls, *args, **named)
            return life

        monkeypatch.setattr(EngineLife, "start", classmethod(start_later))
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        assert (await asyncio.wait_for(sample.result(), 20)).text == text_of(100)
        assert len(attempts) == 2 and sample.num_recoveries == 1
        assert [run_dir.life for run_dir in folders] == [0, 0, 1]
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_an_engine_whose_folder_was_removed_goes_on_in_another_one(run_dirs: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        core = await _start(tmp_path)
        (first,) = await core.tokenizer_manager.submit([1], options(1))
        await asyncio.wait_for(first.result(), PATIENCE_S)  # so all processes have found their sockets
        shutil.rmtree(core._life.run_dir.path)
        (sample,) = await core.tokenizer_manager.submit([1], options(100))
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(100)
        assert sample.num_recoveries == 1 and core._life.run_dir.path.stat().st_mode & 0o777 == 0o700
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_an_engine_goes_on_without_a_spare(run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        core = await _start(tmp_path)
        (sample,) = await core.tokenizer_manager.submit([1], options(100))

        def no_process(*_: object, **__: object) -> None:
            raise OSError(errno.EAGAIN, "no more processes")

        monkeypatch.setattr(engine_core, "ChildProcess", types.SimpleNamespace(start=no_process))
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        assert (await asyncio.wait_for(sample.result(), 20)).text == text_of(100)
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_a_process_that_is_killed_while_it_starts_is_started_again(
    run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "is_stopped", lambda pid: False)

    async def scenario() -> None:
        core = await _start(tmp_path)
        manager = core.tokenizer_manager
        (sample,) = await manager.submit([1], options(100))
        spare = core._spares["scheduler"]
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        os.kill(spare.pid, signal.SIGSTOP)  # it becomes the next scheduler, but never starts
        while spare.launched_with is None:
            await asyncio.sleep(0.01)
        spare.kill()
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(100)
        assert manager.recovery.num_restarts == 2 and sample.num_recoveries == 1
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_a_start_that_hangs_is_ended_and_tried_again(
    run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "is_stopped", lambda pid: False)

    async def scenario() -> None:
        core = await _start(tmp_path)
        assert core._start_limit_s >= 300
        monkeypatch.setattr(restarts, "_RETRY_S", 0.0)
        monkeypatch.setattr("tercet.srt.entrypoints.processes._STOP_TIMEOUT_S", 0.1)
        core._start_limit_s = 0.5
        (sample,) = await core.tokenizer_manager.submit([1], options(100))
        os.kill(core._spares["scheduler"].pid, signal.SIGSTOP)  # it becomes the next scheduler, but never starts
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        while core._budget.num_taken < 2:
            await asyncio.sleep(0.01)
        core._start_limit_s = PATIENCE_S
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(100)
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_an_old_kill_for_memory_explains_no_death(
    run_dirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program of the machine was killed, some time before somebody kills the scheduler."""
    counts = [7]
    monkeypatch.setattr(engine_core, "num_oom_kills", lambda: counts[0])

    async def scenario() -> None:
        core = await _start(tmp_path)
        (sample,) = await core.tokenizer_manager.submit([1], options(400))
        counts[0] += 1
        while core._oom_kills != counts[0]:
            await asyncio.sleep(0.01)
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(400)
        assert (sample.num_recoveries, sample.num_strikes) == (1, 0)
        await core.stop()

    asyncio.run(scenario())


def test_streams_show_life_while_a_process_is_stopped(run_dirs: Path, tmp_path: Path) -> None:
    with ServerProcess(run_dirs, [*toy_flags(tmp_path), "--port", "0"]) as server:
        stream = Stream(server.ready(), "/generate", TOKENS)
        assert stream.begun.wait(PATIENCE_S)
        os.kill(server.children["scheduler"], signal.SIGSTOP)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not stream.comments and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            os.kill(server.children["scheduler"], signal.SIGCONT)
        assert stream.comments[0] == ": waiting"
        assert json.loads(stream.wait().data[-2])["text"] == text_of(150)


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_the_watchdog_ends_a_stopped_process(run_dirs: Path, tmp_path: Path, role: str) -> None:
    async def scenario() -> None:
        core = await _start(tmp_path, watchdog_timeout=3.0)
        (sample,) = await core.tokenizer_manager.submit([1], options(100))
        await asyncio.sleep(0.05)
        os.kill(core.child_pids[role], signal.SIGSTOP)
        out = await asyncio.wait_for(sample.result(), PATIENCE_S)
        assert (out.text, out.finish) == (text_of(100), LengthFinish(100))
        assert (sample.num_recoveries, sample.num_strikes) == (1, 0), "somebody from outside has stopped it"
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


def test_stop_during_a_restart(run_dirs: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        core = await _start(tmp_path)
        (sample,) = await core.tokenizer_manager.submit([1], options(400))
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        while not core.tokenizer_manager.is_restarting:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(core.stop(), PATIENCE_S)
        finish = (await sample.result()).finish
        assert finish is not None and "shut down" in finish.message and not core.died.done()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []
