from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_models import json_of, tiny_flags

from tercet.benchmarks import bench_startup

pytestmark = pytest.mark.e2e

_SIZES = ["--num-requests", "2", "--input-len", "5", "--output-len", "3"]


def test_starts_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERCET_API_KEY", "secret")  # the server reads it, too
    flags = [*tiny_flags(tmp_path), "--skip-tokenizer-init", "--load-format", "dummy"]
    assert bench_startup.main(["--rounds", "2", *_SIZES, *flags]) == 0
    starts = json_of(capsys)["starts"]
    assert len(starts) == 2
    for start in starts:
        assert start["ready_s"] > 0 and start["cpu_s"] > 0
        assert start["pss_bytes_ready"].keys() == start["pss_bytes_used"].keys() == {"http", "scheduler", "detokenizer"}
        assert start["pss_bytes_ready"]["scheduler"] > start["pss_bytes_ready"]["detokenizer"] > 1 << 20
        assert start["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_a_server_that_does_not_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_startup.main([str(tmp_path / "nothing.gguf")]) == 1
    err = capsys.readouterr().err
    assert "the server ended" in err and "nothing.gguf" in err


_DIES = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"internal_states": [{}]}')

    def do_POST(self):
        print("out of memory", flush=True)
        os._exit(3)

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_a_server_that_dies_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dies.py").write_text(_DIES)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{tmp_path}/dies.py' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert bench_startup.main(["--rounds", "1"]) == 1
    err = capsys.readouterr().err
    assert "/generate: the server closed the connection without an answer" in err and "out of memory" in err
