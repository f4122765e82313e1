"""What the processes of a server use: memory, open files, threads, shared memory, files in the run folder, KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROLES = ("scheduler", "detokenizer", "grammar")
_SPARES = {"scheduler": "spare", "detokenizer": "detokenizer spare"}
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Use:
    """What one process uses."""

    rss_bytes: int
    num_files: int
    num_threads: int


def processes_of(pid: int) -> dict[int, str]:
    """The processes of a server by their ids: `http`, and the roles of its children.

    `http_worker`: one of --tokenizer-worker-num. `spare`: the fork server of the scheduler, or a process that will
    become it. `detokenizer spare`: that of the detokenizer.
    """
    found = {pid: "http"}
    try:
        children = psutil.Process(pid).children(recursive=True)
        children = sorted(children + _orphans(pid, children), key=lambda child: child.create_time())
    except psutil.NoSuchProcess:
        return found
    roles, parents = {}, {}
    for child in children:
        try:
            command, parents[child.pid] = child.cmdline(), child.ppid()
        except psutil.Error:
            continue
        roles[child.pid] = command[-1] if command and command[-1] in (*ROLES, "http_worker") else "other"
    for child_pid, role in roles.items():
        peers = [one for one in roles if roles[one] == role]
        forked = [one for one in peers if roles.get(parents[one]) == role]
        is_spare = role in _SPARES and child_pid != (forked or peers)[0]
        found[child_pid] = _SPARES[role] if is_spare else role
    return found


def _orphans(pid: int, known: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Processes of a server whose fork server has died, so that they have another parent. They have its TMPDIR."""
    folder, found = _folder_of(psutil.Process(pid)), []
    pids = {pid, *(child.pid for child in known)}
    for process in psutil.process_iter():
        try:
            if process.pid in pids or process.cmdline()[-1:] not in [[role] for role in ROLES]:
                continue
            parent = process.parent()
            if folder is not None and _folder_of(process) == folder != (_folder_of(parent) if parent else None):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _folder_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("TMPDIR")
    except psutil.AccessDenied:
        return None


def use_by_role(pid: int) -> dict[str, Use]:
    found = {}
    for child, role in processes_of(pid).items():
        try:
            process = psutil.Process(child)
            found[role] = Use(process.memory_info().rss, process.num_fds(), process.num_threads())
        except psutil.Error:
            continue  # it has ended
    return found


def shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.is_dir() else set()


def slopes(series: Sequence[tuple[int, Mapping[str, Use]]]) -> dict[str, float]:
    """Bytes of RSS per request of each process, by least squares over the second half of the series.

    `series`: the number of requests so far, and what the processes used then.
    """
    late = series[len(series) // 2 :]
    found = {}
    for role in late[-1][1]:
        points = [(number, use[role].rss_bytes) for number, use in late if role in use]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        found[role] = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return found
