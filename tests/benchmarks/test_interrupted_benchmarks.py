"""Benchmarks that start a server, when a signal ends them: no server and no file may be left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from bench_models import TINY
from patience import PATIENCE_S

_CODE = """
import signal, sys, tempfile
from tercet.benchmarks import {module}
signal.signal(signal.SIGINT, signal.default_int_handler)
if {ignores_hangup}:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
sys.executable = {server!r}
tempfile.tempdir = {folder!r}
sys.exit({module}.main({argv!r}))
"""


def begun(module: str, tmp_path: Path, *, ignores_hangup: bool = False) -> tuple[subprocess.Popen[bytes], int]:
    """A benchmark whose server is starting, and the server's process id."""
    noted, server, folder = tmp_path / "pid", tmp_path / "server", tmp_path / "temporary"
    server.write_text(f"#!/bin/sh\necho $$ > '{noted}.new'\nmv '{noted}.new' '{noted}'\nexec sleep 300\n")
    server.chmod(0o755)
    folder.mkdir()
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    argv = ["--model-path", str(tmp_path)] if module == "bench_simulation" else []
    code = _CODE.format(module=module, ignores_hangup=ignores_hangup, server=str(server), folder=str(folder), argv=argv)
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
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


def test_a_benchmark_under_nohup_goes_on(tmp_path: Path) -> None:
    process, server = begun("bench_startup", tmp_path, ignores_hangup=True)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
    assert psutil.pid_exists(server)
    process.terminate()
    assert process.wait(PATIENCE_S) == 130
