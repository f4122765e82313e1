"""A process that was started without the files 0, 1 and 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys
from tercet.srt.machine.standard_files import open_standard_files
open_standard_files()
sys.stdout.write("\\u4f60"), sys.stderr.write("x")
kinds = [os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in (0, 1, 2)]
open(sys.argv[1], "w").write(repr((sys.stdin.read(), kinds)))
"""


def test_closed_files_are_open_and_empty_afterwards(tmp_path: Path) -> None:
    result = tmp_path / "result"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([*closed, sys.executable, "-c", CODE, str(result)], env=environ)
    assert (ran.returncode, result.read_text()) == (0, "('', [True, True, True])")
