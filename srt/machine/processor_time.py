"""The processor time of another process."""

from __future__ import annotations

import os

from .process_state import stat_fields


def processor_time_s(pid: int) -> float:
    """Seconds of processor time that a process has used in all its threads, in steps of a clock tick (usually 10 ms).

    0 if there is no such process. Source: proc_pid_stat(5).
    """
    try:
        utime, stime = map(int, stat_fields(pid)[11:13])
    except OSError:
        return 0.0
    return (utime + stime) / os.sysconf("SC_CLK_TCK")
