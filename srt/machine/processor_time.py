"""The processor time of another process."""

from __future__ import annotations

import os
from pathlib import Path


def processor_time_s(pid: int) -> float:
    """Seconds of processor time that a process has used in all its threads, in steps of a clock tick (usually 10 ms).

    0 if there is no such process. Source: proc_pid_stat(5).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    utime, stime = int(fields[11]), int(fields[12])
    return (utime + stime) / os.sysconf("SC_CLK_TCK")
