"""What /proc tells about processes: who belongs to whom, processor time, memory. Linux only."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ROLES = re.compile(rb"\btercet\.srt\.entrypoints\.child\x00(\w+)")
"""A child of Tercet is called by its role: all of its processes run the same program."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    name: str
    cpu_s: float
    """of all its threads, and of the children that it has waited for"""


def all_processes() -> dict[int, Process]:
    """By process id, without zombies."""
    found = (_read_process(int(path.name)) for path in PROC.iterdir() if path.name.isdecimal())
    return {one.pid: one for one in found if one is not None}


def family(root: int, sessions: Collection[int]) -> dict[int, Process]:
    """`root`, all its descendants, and whoever is in one of the sessions or in one that a descendant has begun."""
    processes = all_processes()
    sessions = set(sessions)
    members: dict[int, Process] = {}
    while True:
        new = [
            one
            for one in processes.values()
            if one.pid not in members and (one.pid == root or one.parent in members or one.session in sessions)
        ]
        if not new:
            return members
        members.update((one.pid, one) for one in new)
        sessions.update(one.session for one in new)
        sessions.discard(os.getsid(0))  # whatever happens, the caller's own is no part of it


def pss_bytes(pid: int) -> int:
    """Memory of a process, pages that are shared counted in proportion; 0 for one that is gone."""
    found = re.search(rb"^Pss:\s+(\d+) kB$", _read(PROC / str(pid) / "smaps_rollup"), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def busy_s() -> float:
    """Seconds since the machine's start that its cores were in use, all together; by its host's other guests too."""
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
    """Empty for a process that is gone meanwhile, or is not ours to look at."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
