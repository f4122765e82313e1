"""The state of another process. Source: proc_pid_stat(5)."""

from __future__ import annotations

import os
from pathlib import Path

_EXIT_CODE = 49
"""The index of the field `exit_code` in `stat_fields`."""


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on, which has number 3 there. Raises OSError for no such process."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def is_stopped(pid: int) -> bool:
    """Whether a signal, such as SIGSTOP, or a debugger has stopped a process. False if there is no such process."""
    try:
        return stat_fields(pid)[0] in (b"T", b"t")
    except OSError:
        return False


def exit_code_of_zombie(pid: int) -> int | None:
    """The exit code, as of subprocess, of a process that has ended and that its parent has not waited for.

    None if there is no such process, or if the code is 0: the kernel shows 0 to those who may not read the code, too.
    """
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    status = int(fields[_EXIT_CODE]) if fields[0] == b"Z" else 0
    return os.waitstatus_to_exitcode(status) if status else None
