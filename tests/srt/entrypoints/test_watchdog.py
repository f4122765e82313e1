"""The watchdog on real processes: a scheduler that hangs in C code shows its stacks before it is killed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fake_child
import pytest
from toy_engine import toy_args

from tercet.srt.entrypoints import engine_core
from tercet.srt.entrypoints.engine_core import EngineCore
from tercet.srt.entrypoints.watchdog import HangDetector, Verdict, answer_with_stacks, stacks_of
from tercet.srt.io_struct import AbortFinish, LengthFinish
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

OPTIONS = RequestOptions(sampling=SamplingParams(max_new_tokens=3), stream=True)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("c")))


def start(folder: Path, **settings: object) -> asyncio.Task[EngineCore]:
    args = toy_args(folder)
    for name, value in settings.items():
        object.__setattr__(args, name, value)
    return asyncio.ensure_future(EngineCore.start(args, child_module=fake_child.MODULE))


def test_a_hang_is_ended_once_and_reported_once() -> None:
    detector = HangDetector(10.0, 4.0)
    assert detector.interval_s == 0.5 and HangDetector(0.4, None).interval_s == 0.1
    seconds = [0.0, 3.9, 4.1, 0.0, 4.1, 5.0, 6.0, 9.0, 10.1, 11.0, 12.0, 0.0, 50.0, 51.0, 52.0]
    found = [detector.look(silent_s) for silent_s in seconds]
    assert found[5] is Verdict.REPORT and found[9] is Verdict.END and found[13] is Verdict.END
    assert sum(one is not None for one in found) == 3
    assert [HangDetector(10.0, None).look(one) for one in (11.0, 0.0)] == [None, None]


def test_a_hung_scheduler_shows_its_stacks_and_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        core = await start(tmp_path, watchdog_timeout=1.0, engine_restarts=50)
        (sample,) = await core.tokenizer_manager.submit([fake_child.HANG], OPTIONS)
        finish = (await asyncio.wait_for(sample.result(), 50)).finish
        assert isinstance(finish, AbortFinish) and finish.err_type == "FatalRequest"
        await core.stop()

    asyncio.run(scenario())
    assert "killing the process" in caplog.text and "in hang_here" in caplog.text and "_watch_parent" in caplog.text
    paths = [Path(line.rpartition(" to ")[2]) for line in caplog.messages if line.startswith("Wrote a report")]
    reports = [json.loads(path.read_text()) for path in paths]
    assert any(report["was_hung"] and "in hang_here" in "\n".join(report["stacks"]) for report in reports)


def test_without_restarts_a_hung_engine_dies(tmp_path: Path) -> None:
    async def scenario() -> None:
        core = await start(tmp_path, watchdog_timeout=1.0, engine_restarts=0)
        await core.tokenizer_manager.submit([fake_child.HANG], OPTIONS)
        assert "signal 9" in await asyncio.wait_for(asyncio.shield(core.died), 50)
        await core.stop()

    asyncio.run(scenario())


def test_the_soft_watchdog_only_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "go on"
    monkeypatch.setenv("FAKE_CHILD_GO", str(flag))

    async def scenario() -> None:
        core = await start(tmp_path, soft_watchdog_timeout=1.0)
        pids = core.child_pids
        (sample,) = await core.tokenizer_manager.submit([fake_child.HANG], OPTIONS)
        async with asyncio.timeout(50):
            while "in hang_here" not in caplog.text:
                await asyncio.sleep(0.01)
            flag.touch()
            assert (await sample.result()).finish == LengthFinish(3)
        assert core.child_pids == pids
        await core.stop()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "it goes on" in caplog.text and "killing" not in caplog.text


@pytest.mark.parametrize(
    ("verdict", "silent_s", "is_same_life", "is_stopped", "is_killed", "is_blamed"),
    [
        (Verdict.END, 11.0, True, False, True, True),
        (Verdict.END, 0.5, True, False, False, False),  # it went on while its stacks were read
        (Verdict.END, 11.0, False, False, False, False),  # it has died meanwhile, and another engine runs
        (Verdict.END, 11.0, True, True, True, False),  # SIGSTOP: no request is to blame
        (Verdict.REPORT, 11.0, True, False, False, False),
    ],
)
def test_who_is_killed_after_its_stacks_were_read(
    monkeypatch: pytest.MonkeyPatch,
    verdict: Verdict,
    silent_s: float,
    is_same_life: bool,
    is_stopped: bool,
    is_killed: bool,
    is_blamed: bool,
) -> None:
    killed: list[str] = []
    child = SimpleNamespace(role="scheduler", pid=1, kill=lambda: killed.append("scheduler"))
    life = SimpleNamespace(run_dir=SimpleNamespace(stacks=Path))
    heartbeats = SimpleNamespace(silent_s=lambda role: silent_s)
    manager = SimpleNamespace(heartbeats=heartbeats, server_args=SimpleNamespace(watchdog_timeout=10.0))
    core = SimpleNamespace(_life=life, tokenizer_manager=manager, _hung=None, _stacks="")

    async def report(*_: object) -> str:
        core._life = life if is_same_life else None
        return "stacks"

    monkeypatch.setattr(engine_core, "report_hang", report)
    monkeypatch.setattr(engine_core, "is_stopped", lambda pid: is_stopped)
    asyncio.run(EngineCore._on_hang(core, child, verdict, 11.0))  # type: ignore[arg-type]
    assert bool(killed) == is_killed and (core._hung is child) == is_blamed
    assert core._stacks == ("stacks" if is_killed else "")


def test_a_stopped_process_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    code = f"import {answer_with_stacks.__module__} as w, pathlib; w.answer_with_stacks(pathlib.Path({str(path)!r}))"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert "most recent call first" in asyncio.run(stacks_of(process, path))
        assert path.read_text().count("<module>") == 1
        process.send_signal(signal.SIGSTOP)
        assert asyncio.run(stacks_of(process, path)) == ""
    finally:
        process.kill()
        process.wait()


def test_a_process_ends_without_a_warning_about_its_file(tmp_path: Path) -> None:
    code = "import sys; from tercet.srt.entrypoints.watchdog import *; answer_with_stacks(Path(sys.argv[1]))"
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "stacks")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
