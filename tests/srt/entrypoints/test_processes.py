"""Starting, watching and ending child processes: real ones, with a made-up model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_child
import psutil
import pytest
from patience import PATIENCE_S
from toy_engine import environment, is_gone, toy_args

from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.entrypoints.handshake import ReportReader, write_frame
from tercet.srt.entrypoints.processes import ChildProcess, stop_children
from tercet.srt.errors import EngineDead
from tercet.srt.io_struct import LengthFinish
from tercet.srt.ipc import RunDir
from tercet.srt.machine.cores import cgroup_quota, usable_cores
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.server_args import ServerArgs
from tercet.srt.start_reports import DetokenizerReady


def options(**sampling: Any) -> RequestOptions:
    return RequestOptions(sampling=SamplingParams(**sampling), stream=True)


NewChildren = Callable[[], list[psutil.Process]]


@pytest.fixture
def server_args(tmp_path: Path) -> ServerArgs:
    return toy_args(tmp_path)


@pytest.fixture(autouse=True)
def run_dirs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's run directories go; short, as a socket's name has to be."""
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.fixture
def new_children() -> NewChildren:
    """The processes that the test has started and that run. Other tests of this pytest may have left some."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


async def _start(server_args: ServerArgs, **changes: Any) -> EngineCore:
    server_args = dataclasses.replace(server_args, **changes)
    return await EngineCore.start(server_args, child_module=fake_child.MODULE)


def test_a_request_goes_round(server_args: ServerArgs, run_dirs: Path, new_children: NewChildren) -> None:
    async def scenario() -> None:
        core = await _start(server_args)
        (generation,) = await core.tokenizer_manager.submit([1, 2, 3], options(max_new_tokens=4))
        out = await generation.result()
        assert (out.text, out.finish) == ("<0> <1> <2> <3> ", LengthFinish(4))
        assert os.listdir(run_dirs)
        await core.stop()
        await core.stop()
        assert not core.died.done()
        assert all(is_gone(pid, 0.1) for pid in core.child_pids.values())

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []
    assert new_children() == []


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_without_restarts_a_killed_child_fails_every_request(
    server_args: ServerArgs, run_dirs: Path, new_children: NewChildren, role: str
) -> None:
    async def scenario() -> None:
        core = await _start(server_args, engine_restarts=0)
        manager = core.tokenizer_manager
        running = []
        for _ in range(16):
            running += await manager.submit([1], options(max_new_tokens=400))
        await anext(aiter(running[0].__aiter__()))
        results = [asyncio.ensure_future(generation.result()) for generation in running[1:]]
        os.kill(core.child_pids[role], signal.SIGKILL)
        outs = await asyncio.wait_for(asyncio.gather(*results), PATIENCE_S)
        for out in outs:
            assert out.finish is not None
            assert out.finish.err_type == "EngineDead"
            assert "signal 9" in out.finish.message
        assert not manager.is_healthy
        assert role in await core.died
        with pytest.raises(EngineDead):
            await manager.submit([1], options())
        await core.stop()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []
    assert new_children() == []


@pytest.mark.parametrize(
    ("behaviour", "error", "words"),
    [
        ("user error", ValueError, "the weights are of the wrong kind"),
        ("bug", EngineDead, "RuntimeError: something broke"),
        ("exit", EngineDead, r"scheduler process died while it started \(exit code 7\)"),
    ],
)
def test_a_failed_start_says_why_and_leaves_nothing(
    server_args: ServerArgs,
    run_dirs: Path,
    new_children: NewChildren,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setenv("FAKE_CHILD", behaviour)
    with pytest.raises(error, match=words):
        asyncio.run(asyncio.wait_for(_start(server_args), PATIENCE_S))
    assert os.listdir(run_dirs) == []
    assert new_children() == []


def test_a_parent_that_fails_after_its_children_are_ready_leaves_nothing(
    server_args: ServerArgs, run_dirs: Path, new_children: NewChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no manager today")

    monkeypatch.setattr("tercet.srt.entrypoints.engine_core.TokenizerManager", broken)
    with pytest.raises(RuntimeError, match="no manager today"):
        asyncio.run(_start(server_args))
    assert os.listdir(run_dirs) == []
    assert new_children() == []


def test_a_start_can_be_cancelled(
    server_args: ServerArgs, run_dirs: Path, new_children: NewChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "slow start")

    async def scenario() -> None:
        starting = asyncio.create_task(_start(server_args))
        while len(new_children()) < 2:
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.wait([starting], timeout=PATIENCE_S)
        assert starting.cancelled()

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []
    assert new_children() == []


def test_children_leave_sigterm_to_their_parent(server_args: ServerArgs, run_dirs: Path) -> None:
    """A service manager may send it to all processes of a service at once."""

    async def scenario() -> None:
        core = await _start(server_args)
        (generation,) = await core.tokenizer_manager.submit([1], options(max_new_tokens=30))
        for _ in range(3):
            for pid in core.child_pids.values():
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGHUP)
            await asyncio.sleep(0.02)
        assert (await generation.result()).finish == LengthFinish(30)
        assert not core.died.done()
        await core.stop()
        assert all(is_gone(pid, 0.1) for pid in core.child_pids.values())

    asyncio.run(scenario())
    assert os.listdir(run_dirs) == []


@pytest.mark.parametrize("behaviour", ["", "slow start"])
def test_a_child_ends_when_its_parent_asks(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    """One that still starts too, although it is anywhere in its start. Neither has to be killed."""
    monkeypatch.setenv("FAKE_CHILD", behaviour)

    async def scenario() -> None:
        run_dir = RunDir.create()
        child = ChildProcess.start("scheduler", fake_child.MODULE).launch(server_args, run_dir)
        if not behaviour:
            await child.ready
        child.ask_to_stop()
        child.ask_to_stop()
        assert "exit code 0" in await asyncio.wait_for(child.ended, PATIENCE_S)
        child.ask_to_stop()
        run_dir.remove()

    asyncio.run(scenario())


def test_a_spare_that_is_needed_does_not_wait_for_its_modules(
    server_args: ServerArgs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside programs that use all cores, an import at the lowest priority may take minutes."""
    began = tmp_path / "began"
    (tmp_path / "endless.py").write_text(
        f"import pathlib, time\npathlib.Path({str(began)!r}).touch()\ntime.sleep(3600)\n"
    )
    (tmp_path / "slow_child.py").write_text(
        "import sys\nimport fake_child\nfrom tercet.srt.entrypoints import child\n"
        'child._MODULES = {"scheduler": "endless"}\nsys.exit(child.main(fake_child.ROLES))\n'
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario() -> None:
        run_dir = RunDir.create()
        spare = ChildProcess.start("scheduler", "slow_child")
        while not began.exists():
            assert not spare.ended.done()
            await asyncio.sleep(0.01)
        spare.launch(server_args, run_dir)
        await asyncio.wait_for(asyncio.shield(spare.ready), PATIENCE_S)
        spare.ask_to_stop()
        assert "exit code 0" in await asyncio.wait_for(spare.ended, PATIENCE_S)
        run_dir.remove()

    asyncio.run(scenario())


def test_the_random_seed_is_drawn_once_for_all_processes(
    server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[ServerArgs] = []

    class Spy(ChildProcess):
        def launch(self, server_args: ServerArgs, run_dir: RunDir) -> ChildProcess:
            launched.append(server_args)
            return super().launch(server_args, run_dir)

    monkeypatch.setattr("tercet.srt.entrypoints.engine_life.ChildProcess", Spy)

    async def seed_of(args: ServerArgs) -> int | None:
        core = await _start(args)
        await core.stop()
        return core.tokenizer_manager.server_args.random_seed

    with caplog.at_level("INFO"):
        drawn = [asyncio.run(seed_of(server_args)) for _ in range(2)]
    assert drawn[0] != drawn[1] and None not in drawn
    assert [args.random_seed for args in launched] == [drawn[0], drawn[0], drawn[1], drawn[1]]
    assert f"The random seed is {drawn[1]}" in caplog.text
    given = dataclasses.replace(server_args, random_seed=7)
    assert asyncio.run(seed_of(given)) == 7


def test_a_child_that_is_deaf_to_its_parent_is_killed(server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CHILD", "deaf")
    monkeypatch.setattr("tercet.srt.entrypoints.processes._STOP_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        run_dir = RunDir.create()
        child = ChildProcess.start("scheduler", fake_child.MODULE).launch(server_args, run_dir)
        await child.ready
        await stop_children([child])
        assert "signal 9" in child.ended.result()
        run_dir.remove()

    asyncio.run(scenario())


HOLDER = """
import asyncio, sys
from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.server_args import ServerArgs

async def main():
    args = ServerArgs(model_path=sys.argv[1], load_format="dummy", skip_tokenizer_init=True)
    core = await EngineCore.start(args, child_module="fake_child")
    sys.stdout.write(" ".join(map(str, core.child_pids.values())) + "\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_children_follow_a_killed_parent_and_take_the_sockets_along(server_args: ServerArgs, run_dirs: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, server_args.model_path], stdout=subprocess.PIPE, env=environment(run_dirs)
    ) as holder:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 2
        assert os.listdir(run_dirs)
        holder.kill()
    assert all(is_gone(pid) for pid in pids)
    assert os.listdir(run_dirs) == []


HASTY = """
import asyncio, os, signal, sys
from tercet.srt.entrypoints.processes import ChildProcess
from tercet.srt.ipc import RunDir
from tercet.srt.server_args import ServerArgs

async def main():
    args = ServerArgs(model_path=sys.argv[1], load_format="dummy", skip_tokenizer_init=True)
    child = ChildProcess.start("scheduler", "fake_child").launch(args, RunDir.create())
    sys.stdout.write(f"{child.pid}\\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_children_that_still_import_their_modules_follow_a_killed_parent(
    server_args: ServerArgs, run_dirs: Path
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HASTY, server_args.model_path], stdout=subprocess.PIPE, env=environment(run_dirs)
    )
    assert is_gone(int(ran.stdout))
    assert os.listdir(run_dirs) == []


def test_a_report_may_come_in_pieces() -> None:
    read_end, write_end = os.pipe()
    write_frame(write_end, DetokenizerReady())
    data = os.read(read_end, 1000)
    os.close(read_end)
    os.close(write_end)
    reader = ReportReader()
    reports = [reader.feed(data[i : i + 1]) for i in range(len(data))]
    assert reports == [None] * (len(data) - 1) + [DetokenizerReady()]


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/outside\n", {"cpu.max": "50000 100000"}, 0.5),
        ("1:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}, 2.0),
        ("1:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("1:cpu,cpuacct:/x\n", {"cpu,cpuacct/x/cpu.cfs_quota_us": "7", "cpu,cpuacct/x/cpu.cfs_period_us": "2"}, 3.5),
        ("", {}, None),
    ],
)
def test_cpu_quota_of_both_cgroup_versions(
    tmp_path: Path, own: str, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_quota(tmp_path / "root", tmp_path / "own") == quota


def test_usable_cores_is_at_least_one_and_at_most_the_affinity_mask() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
