"""The `tercet` command as a process: what it imports, and Ctrl-C meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_engine import environment

from tercet import __version__


def test_help_and_version_load_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
import time
from tercet.commands import main
try: main(sys.argv[1:])
except SystemExit: pass
sys.stderr.write(str([name for name in ("torch", "transformers", "zmq", "uvicorn", "numpy") if name in sys.modules]))
"""
    for argv, words in ((["--help"], "serve"), (["--version"], f"tercet {__version__}"), (["serve", "-h"], "--port")):
        ran = subprocess.run(
            [sys.executable, "-c", code, *argv], env=environment(tmp_path), capture_output=True, text=True, timeout=60
        )
        assert words in ran.stdout
        assert ran.stderr == "[]"


@pytest.mark.parametrize("module", ["tercet", "tercet.launch_server"])
def test_ctrl_c_during_the_imports_shows_no_traceback(tmp_path: Path, module: str) -> None:
    (tmp_path / "yaml.py").write_text("raise KeyboardInterrupt\n")
    env = environment(tmp_path)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    ran = subprocess.run([sys.executable, "-m", module, "--help"], env=env, capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")
