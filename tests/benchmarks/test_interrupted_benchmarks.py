"""Benchmarks that start a server, when a signal ends them: no server and no file may be left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_models import TINY
from patience import PATIENCE_S

from tercet.benchmarks.server_process import ended_by_signals, running_server

pytestmark = pytest.mark.timeout(300)

_CODE = """
import signal, sys, tempfile
from tercet.benchmarks import {module}
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in {ignored}:
    signal.signal(ignored, signal.SIG_IGN)
sys.executable = {server!r}
tempfile.tempdir = {folder!r}
sys.exit({module}.main({argv!r}))
"""

_SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with open({noted!r} + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename({noted!r} + ".new", {noted!r})
        self.send_error(503)

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def begun(module: str, tmp_path: Path, ignored: Sequence[int] = ()) -> tuple[subprocess.Popen[bytes], int]:
    """A benchmark that has asked its server whether it is ready, and the server's process id."""
    noted, server, folder = tmp_path / "pid", tmp_path / "server", tmp_path / "temporary"
    (tmp_path / "server.py").write_text(_SERVER.format(noted=str(noted)))
    server.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{tmp_path}/server.py' \"$@\"\n")
    server.chmod(0o755)
    folder.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    argv = ["--model-path", str(tmp_path)] if module == "bench_simulation" else []
    code = _CODE.format(
        module=module, ignored=list(map(int, ignored)), server=str(server), folder=str(folder), argv=argv
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ)
    while not noted.exists():
        assert process.poll() is None, "it ended too early"
        time.sleep(0.05)
    assert list(folder.iterdir())
    return process, int(noted.read_text())


@pytest.mark.parametrize("module", ["bench_startup", "bench_simulation"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_and_removes_the_files(module: str, signum: int, tmp_path: Path) -> None:
    process, server = begun(module, tmp_path)
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 130
    assert not psutil.pid_exists(server)
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("module", ["bench_startup", "bench_simulation"])
def test_a_job_of_a_script_ends_although_it_ignores_ctrl_c(module: str, tmp_path: Path) -> None:
    process, server = begun(module, tmp_path, [signal.SIGINT])
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 130
    assert not psutil.pid_exists(server)


def test_a_benchmark_under_nohup_goes_on(tmp_path: Path) -> None:
    process, server = begun("bench_startup", tmp_path, [signal.SIGHUP])
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    assert psutil.pid_exists(server)
    process.terminate()
    assert process.wait(PATIENCE_S) == 130


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_server_is_started_stops_it(
    signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self.pid)
            signal.raise_signal(signum)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.getsignal(signum)
    server = running_server(["sleep", "1000"], {}, tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), ended_by_signals(), server:
        pytest.fail("the signal was forgotten")
    assert len(started) == 1 and not psutil.pid_exists(started[0])
    assert signal.getsignal(signum) == before
