"""Fork servers: real processes, which fork schedulers and detokenizers with made-up tokens. tests/e2e has the model."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import logging
import os
import resource
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import forking_child
import psutil
import pytest
import torch
from patience import PATIENCE_S
from toy_engine import is_gone, text_of, toy_args

from tercet.managers.scheduler_process import LoadedModel
from tercet.srt.entrypoints import forks
from tercet.srt.entrypoints.child import LoadedTokenizer
from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.entrypoints.handshake import LaunchSpec
from tercet.srt.entrypoints.processes import ChildProcess
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams


@pytest.fixture(autouse=True)
def run_dirs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("c")))
    return path


async def start(folder: Path, **settings: Any) -> EngineCore:
    args = dataclasses.replace(toy_args(folder), **settings)
    return await EngineCore.start(args, child_module=forking_child.MODULE)


async def answer_after_a_kill(
    core: EngineCore, role: str, signum: int = signal.SIGKILL, *, num_strikes: int = 0
) -> str:
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=60), stream=True)
    (sample,) = await core.tokenizer_manager.submit([1], options)
    num_restarts = core.tokenizer_manager.recovery.num_restarts
    os.kill(core.child_pids[role], signum)
    out = await asyncio.wait_for(sample.result(), PATIENCE_S)
    assert core.tokenizer_manager.recovery.num_restarts == num_restarts + 1
    assert sample.num_strikes == num_strikes
    return out.text


def test_each_life_is_forked_by_the_same_processes(run_dirs: Path, tmp_path: Path) -> None:
    async def scenario() -> set[int]:
        core = await start(tmp_path)
        servers = {role: server.pid for role, server in core._spares.items()}
        pids = {*servers.values(), *core.child_pids.values()}
        assert servers.keys() == {"scheduler", "detokenizer"} and len(pids) == 4
        for role in ("scheduler", "detokenizer", "scheduler"):
            assert psutil.Process(core.child_pids[role]).ppid() == servers[role]
            assert await answer_after_a_kill(core, role) == text_of(60)
            assert {role: server.pid for role, server in core._spares.items()} == servers
            pids |= {*core.child_pids.values()}
        await core.stop()
        return pids

    assert all(is_gone(pid) for pid in asyncio.run(scenario()))
    assert os.listdir(run_dirs) == []


@pytest.mark.parametrize("num_chars", [150_000, 1_000_000])
def test_settings_of_any_length_reach_each_life(tmp_path: Path, num_chars: int) -> None:
    """A chat template may be given as text."""

    async def scenario() -> None:
        core = await start(tmp_path, chat_template="{" + "x" * num_chars)
        assert await answer_after_a_kill(core, "scheduler") == text_of(60)
        await core.stop()

    asyncio.run(scenario())


def test_the_exit_code_comes_through_the_fork_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        core = await start(tmp_path, engine_restarts=1)
        first = core._life.children[0]
        await answer_after_a_kill(core, "scheduler")
        assert (first.returncode, await first.ended) == (-9, "the scheduler process died (signal 9)")
        await core.stop()

    asyncio.run(scenario())


def test_a_death_is_seen_at_once_while_the_fork_server_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams would be silent meanwhile. The next life cannot be forked, and starts anew."""
    monkeypatch.setattr("tercet.srt.entrypoints.processes._REAP_TIMEOUT_S", float("inf"))

    async def scenario() -> None:
        core = await start(tmp_path, engine_restarts=3)
        scheduler, server = core._life.children[0], core._spares["scheduler"]
        os.kill(server.pid, signal.SIGSTOP)
        monkeypatch.setattr(forks, "_TIMEOUT_S", 0.1)
        os.kill(scheduler.pid, signal.SIGKILL)
        assert await asyncio.wait_for(scheduler.ended, PATIENCE_S) == "the scheduler process died (signal 9)"
        await core.stop()

    asyncio.run(scenario())


def test_a_bus_error_ends_the_fork_server(tmp_path: Path) -> None:
    """A weight file that was cut short while it was mapped would end each of its forks."""

    async def scenario() -> None:
        core = await start(tmp_path)
        servers = dict(core._spares)
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=60), stream=True)
        (sample,) = await core.tokenizer_manager.submit([1], options)
        os.kill(core.child_pids["scheduler"], signal.SIGBUS)
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(60)
        await asyncio.wait_for(servers["scheduler"].ended, PATIENCE_S)
        assert core._spares["scheduler"].pid != servers["scheduler"].pid
        await core.stop()

    asyncio.run(scenario())


def test_the_engine_runs_on_without_its_fork_server(tmp_path: Path) -> None:
    """The next life has another one. Nobody knows how a process has ended whose fork server is gone."""

    async def scenario() -> None:
        core = await start(tmp_path)
        scheduler, server = core._life.children[0], core._spares["scheduler"]
        server.kill()
        await server.ended
        assert not scheduler.ended.done()
        assert await answer_after_a_kill(core, "scheduler") == text_of(60)
        assert scheduler.returncode == forks.UNKNOWN_EXIT and "(exit code unknown)" in await scheduler.ended
        assert core._spares["scheduler"].launched_with is not None
        assert psutil.Process(core.child_pids["scheduler"]).ppid() == core._spares["scheduler"].pid != server.pid
        await core.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_fork_server_that_dies_with_its_fork_costs_one_restart(
    is_seen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`is_seen`: its link is closed already, but nobody knows yet how it has ended."""

    async def scenario() -> None:
        core = await start(tmp_path, engine_restarts=1)
        server = core._spares["scheduler"]
        link = server._forks
        assert link is not None

        async def fork(spec: LaunchSpec) -> Any:
            os.kill(server.pid, signal.SIGKILL)
            if is_seen:
                link.close()
            return await forks.ForkLink.fork(link, spec)

        link.fork = fork  # type: ignore[method-assign]
        assert await answer_after_a_kill(core, "scheduler") == text_of(60)
        await core.stop()

    asyncio.run(scenario())
    assert "The fork server has died, too; starting new processes" in caplog.text


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_fork_server_that_does_not_answer_is_replaced(
    is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked if it is seen to be stopped."""
    monkeypatch.setattr("tercet.srt.entrypoints.restarts._RETRY_S", 0.0)
    if not is_seen:
        monkeypatch.setattr("tercet.srt.entrypoints.engine_core.is_stopped", lambda pid: False)

    async def scenario() -> None:
        core = await start(tmp_path, engine_restarts=3)
        server = core._spares["detokenizer"]
        os.kill(server.pid, signal.SIGSTOP)
        monkeypatch.setattr(forks, "_TIMEOUT_S", float("inf") if is_seen else 0.1)
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(server.ended), PATIENCE_S)
        monkeypatch.setattr(forks, "_TIMEOUT_S", PATIENCE_S)
        (sample,) = await core.tokenizer_manager.submit([1], RequestOptions(sampling=SamplingParams(max_new_tokens=5)))
        assert (await asyncio.wait_for(sample.result(), PATIENCE_S)).text == text_of(5)
        await core.stop()

    asyncio.run(scenario())


def test_the_fork_server_of_a_gpu_engine_outlives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started with `--device auto`, and the next life is one with `--device cuda`."""
    monkeypatch.setenv("FAKE_CHILD", "gpu")

    async def scenario() -> None:
        core = await start(tmp_path, device="auto")
        server = core._spares["detokenizer"]
        assert await answer_after_a_kill(core, "detokenizer") == text_of(60)
        assert core._spares["detokenizer"] is server and not server.ended.done()
        await core.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("changes", [{"weight_version": "2"}, {}])
def test_replaced_weights_end_the_fork_server(tmp_path: Path, changes: dict[str, str]) -> None:
    """Even if they come from the same path and have the same name."""

    async def scenario() -> None:
        core = await start(tmp_path)
        server, weights = core._spares["scheduler"], core.tokenizer_manager.weights
        weights.server_args = dataclasses.replace(weights.server_args, **changes)
        weights.num_updates += 1
        core._renew_spares()
        await asyncio.wait_for(server.ended, PATIENCE_S)
        assert core._spares["scheduler"].launched_with is None
        # Its exit code is lost, because the engine has ended the fork server itself. So the request may be to blame.
        assert await answer_after_a_kill(core, "scheduler", signal.SIGABRT, num_strikes=1) == text_of(60)
        assert core._spares["scheduler"].launched_with == weights.server_args
        await core.stop()

    asyncio.run(scenario())


def test_a_spare_that_cannot_be_started_is_reported_once_for_each_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watchdog tries twice a second, for as long as the server runs."""
    codes = [errno.EMFILE, errno.EMFILE, errno.ENOMEM, None, errno.ENOMEM]

    async def scenario() -> None:
        core = await start(tmp_path)
        start_spare = ChildProcess.start
        for code in codes:

            def fail_or_start(*args: Any, code: int | None = code, **settings: Any) -> ChildProcess:
                if code is not None:
                    raise OSError(code, os.strerror(code))
                return start_spare(*args, **settings)

            if "scheduler" in core._spares:
                core._spares.pop("scheduler").kill()
            monkeypatch.setattr(ChildProcess, "start", fail_or_start)
            core._renew_spares()
            assert ("scheduler" in core._spares) == (code is None)
        monkeypatch.setattr(ChildProcess, "start", start_spare)
        await core.stop()

    with caplog.at_level(logging.WARNING, "tercet"):
        asyncio.run(scenario())
    reasons = [one.args[0] for one in caplog.records if one.message.startswith("Could not start a spare process")]
    assert reasons == [os.strerror(code) for code in (errno.EMFILE, errno.ENOMEM, errno.ENOMEM)]


def test_other_adapters_leave_the_fork_server_and_reach_its_forks(tmp_path: Path) -> None:
    """A fork loads the adapters itself, and the fork server has none."""

    async def scenario() -> None:
        core = await start(tmp_path, enable_lora=True, max_loras=1, max_lora_rank=1)
        server, weights = core._spares["scheduler"], core.tokenizer_manager.weights
        weights.server_args = dataclasses.replace(weights.server_args, lora_paths=["a=/a"])
        core._renew_spares()
        assert core._spares["scheduler"] is server
        assert await answer_after_a_kill(core, "scheduler") == text_of(60)
        assert core._spares["scheduler"] is server and not server.ended.done()
        (scheduler,) = [one for one in core._life.children if one.role == "scheduler"]
        assert scheduler.launched_with is not None and scheduler.launched_with.lora_paths == ["a=/a"]
        await core.stop()

    asyncio.run(scenario())


def test_a_fork_has_the_settings_of_its_launch(tmp_path: Path) -> None:
    config, runner = object(), object()
    loaded = LoadedModel(toy_args(tmp_path), config, None, runner)  # type: ignore[arg-type]
    changed = dataclasses.replace(loaded.server_args, lora_paths=["a=/a"])
    assert loaded.with_settings(changed) == LoadedModel(changed, config, None, runner)  # type: ignore[arg-type]
    assert LoadedTokenizer(None).with_settings(changed) == LoadedTokenizer(None)


def test_a_fork_that_nobody_needs_leaves_the_engine_its_folder(tmp_path: Path) -> None:
    async def scenario() -> None:
        core = await start(tmp_path)
        fork = await core._spares["detokenizer"].fork(
            core.tokenizer_manager.server_args, core._life.run_dir.next_life()
        )
        await asyncio.wait_for(asyncio.shield(fork.ready), PATIENCE_S)
        fork._process.stdin.close()
        await asyncio.wait_for(asyncio.shield(fork.ended), PATIENCE_S)
        assert core._life.run_dir.path.exists()
        await core.stop()

    asyncio.run(scenario())


def test_a_restart_that_raises_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        core = await start(tmp_path)

        async def kill() -> None:
            raise ValueError("a defect")

        monkeypatch.setattr(core._life, "kill", kill)
        os.kill(core.child_pids["scheduler"], signal.SIGKILL)
        message = await asyncio.wait_for(asyncio.shield(core.died), PATIENCE_S)
        assert message == "the engine could not be restarted: a defect"
        assert core.tokenizer_manager.failure is not None
        await core.stop()

    asyncio.run(scenario())


def test_the_number_of_open_files_does_not_matter() -> None:
    """select.select takes no file descriptor from 1024 on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 1200:
        pytest.skip("few open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(child.pid)
    high = fcntl.fcntl(pidfd, fcntl.F_DUPFD_CLOEXEC, 1100)
    os.close(pidfd)
    fork = forks.ForkedProcess(child.pid, high, child.stdin, lambda: True)
    assert fork.poll() is None
    fork.kill()
    while fork.poll() is None:
        time.sleep(0.01)
    assert fork.returncode == -signal.SIGKILL, "it is a child of this process, as orphans of process 1 are"
    child.stdin.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_restarts_nothing_is_forked(tmp_path: Path) -> None:
    async def scenario() -> None:
        core = await start(tmp_path, engine_restarts=0)
        assert core._spares == {}
        assert all(psutil.Process(pid).ppid() == os.getpid() for pid in core.child_pids.values())
        await core.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("device", "compiled", "host_kv", "may_fork"),
    [("cpu", True, None, True), ("cuda", True, None, False), ("cpu", False, None, False), ("cpu", True, "1 GB", False)],
)
def test_only_a_compiled_model_of_a_cpu_is_forked(
    tmp_path: Path, device: str, compiled: bool, host_kv: object, may_fork: bool
) -> None:
    settings = types.SimpleNamespace(device=torch.device(device))
    runner: Any = types.SimpleNamespace(
        settings=settings, model=types.SimpleNamespace(compiled=compiled), host_kv=host_kv
    )
    config: Any = None
    assert LoadedModel(toy_args(tmp_path), config, None, runner).may_fork == may_fork
