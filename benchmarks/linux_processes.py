"""Reads the parents, sessions, processor time and memory of processes from /proc. Linux only."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROLES = re.compile(rb"\btercet\.srt\.entrypoints\.child\x00\d+\x00(\w+)")
"""Finds the role of a Tercet child process. The role is its name, because all its processes run the same program."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    name: str
    cpu_s: float
    """Processor seconds of all its threads, and of the children that it has waited for."""


def all_processes() -> dict[int, Process]:
    """All processes by process id, without zombies."""
    found = (_read_process(int(path.name)) for path in PROC.iterdir() if path.name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def family(root: int, sessions: Collection[int]) -> dict[int, Process]:
    """`root`, its descendants, and all processes in the given sessions or in a session that a descendant started."""
    processes = all_processes()
    sessions = set(sessions)
    members: dict[int, Process] = {}
    while True:
        new = [
            process
            for process in processes.values()
            if process.pid not in members
            and (process.pid == root or process.parent in members or process.session in sessions)
        ]
        if not new:
            return members
        members.update((process.pid, process) for process in new)
        sessions.update(process.session for process in new)
        sessions.discard(os.getsid(0))  # the caller's own session never belongs to the family


def pss_bytes(pid: int) -> int:
    """Memory of a process (PSS: shared pages count in proportion); 0 for a process that has ended."""
    found = re.search(rb"^Pss:\s+(\d+) kB$", _read(PROC / str(pid) / "smaps_rollup"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def busy_s() -> float:
    """Seconds of use of all cores since the machine's start. Use by other guests of a virtual host counts, too."""
    first, _, _ = _read(PROC / "stat").partition(b"\n")
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_guests = (int(word) for word in first.split()[1:])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _read_process(pid: int) -> Process | None:
    head, _, rest = _read(PROC / str(pid) / "stat").rpartition(b")")
    fields = rest.split()
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    role = _ROLES.search(_read(PROC / str(pid) / "cmdline"))
    name = role[1] if role else head.partition(b"(")[2]
    ticks = sum(int(word) for word in fields[11:15])
    return Process(pid, int(fields[1]), int(fields[3]), name.decode(errors="replace"), ticks / _TICKS_PER_S)


def _read(path: Path) -> bytes:
    """The file's content; empty if the process has ended or is not readable for us."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
