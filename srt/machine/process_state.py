"""The state of another process. Source: proc_pid_stat(5)."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on, which has number 3 there. Raises OSError for no such process."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def is_stopped(pid: int) -> bool:
    """Whether a signal, such as SIGSTOP, or a debugger has stopped a process. False if there is no such process."""
    try:
        return stat_fields(pid)[0] in (b"T", b"t")
    except OSError:
        return False
