"""scripts/clients when a signal ends it, with a server that takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S

FOLDER = Path(__file__).parents[1] / "scripts" / "clients.d"
_SERVER = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if {is_deaf}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
_CODE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
import run
run.ENVIRONMENTS = Path({place!r})
run.STOP_TIMEOUT_S = 0.5
run.make_model = lambda: None
run.Client.install = lambda self: None
run.Client.run = lambda self, url: (Path({place!r}, "begun").touch(), time.sleep(300))
sys.executable, sys.argv = {server!r}, ["run", "openai"]
sys.exit(run.main())
"""


@pytest.mark.parametrize("is_deaf", [False, True])
def test_sigterm_ends_the_server(tmp_path: Path, is_deaf: bool) -> None:
    (tmp_path / "server.py").write_text(_SERVER.format(is_deaf=is_deaf))
    server = tmp_path / "python"
    server.write_text(f"#!/bin/sh\necho $$ > '{tmp_path}/pid'\nexec '{sys.executable}' '{tmp_path}/server.py' \"$@\"\n")
    server.chmod(0o755)
    code = _CODE.format(folder=str(FOLDER), place=str(tmp_path), server=str(server))
    script = subprocess.Popen([sys.executable, "-c", code], env=os.environ, stderr=subprocess.DEVNULL)
    while not (tmp_path / "begun").exists():
        assert script.poll() is None, "it ended too early"
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(PATIENCE_S) != 0
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
