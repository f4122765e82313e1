"""A stopped process is told from a running one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tercet.srt.machine.process_state import is_stopped


def test_a_stopped_process_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
