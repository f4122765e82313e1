"""A stopped process is told from a running one, and the exit code of an ended one is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tercet.srt.machine.process_state import exit_code_of_zombie, is_stopped


def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


@pytest.mark.parametrize(
    ("end", "code"),
    [("os.kill(os.getpid(), 9)", -9), ("os.abort()", -signal.SIGABRT), ("os._exit(3)", 3), ("os._exit(0)", None)],
)
def test_the_exit_code_is_known_before_the_parent_has_waited(end: str, code: int | None) -> None:
    with subprocess.Popen([sys.executable, "-c", f"import os\ninput()\n{end}"], stdin=subprocess.PIPE) as process:
        assert exit_code_of_zombie(process.pid) is None
        process.stdin.write(b"\n")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code_of_zombie(process.pid) == code
    assert exit_code_of_zombie(process.pid) is None
