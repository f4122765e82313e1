"""The memory of the machine, and the part of it that this process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...srt.machine.cgroups import ROOT, ControlGroup, control_groups, read_text

_UNLIMITED = 1 << 60
"""Version 1 of control groups writes "no limit" as a number above this one."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: that of a device, or the part of the host's that this process may use."""

    total: int
    available: int


class _Files(NamedTuple):
    """File names of a control group, which depend on the version."""

    limits: tuple[str, ...]
    usage: str
    page_cache: tuple[str, ...]
    """entries of memory.stat. File pages count as used, but the kernel drops them when memory is short"""


_CGROUP_FILES = {
    2: _Files(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}


def host_memory(proc: Path = Path("/proc"), cgroup_root: Path = ROOT) -> Memory:
    """The memory that this process may use: the machine's, or less if a control group sets a limit.

    Containers, systemd and Slurm set such limits.
    """
    lines = read_text(proc / "meminfo").splitlines()
    meminfo = {key: int(value.split()[0]) * 1024 for key, _, value in (line.partition(":") for line in lines)}
    total, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    for group in control_groups("memory", cgroup_root, proc / "self" / "cgroup"):
        files = _CGROUP_FILES[group.version]
        limits = [limit for name in files.limits if (limit := group.number(name)) is not None and limit < _UNLIMITED]
        if limits:
            total = min(total, *limits)
            available = min(available, min(limits) - _used(group, files))
    return Memory(total, max(available, 0))


def _used(group: ControlGroup, files: _Files) -> int:
    """Bytes in use by the group, without the file pages that the kernel can drop."""
    stat = dict(line.split(maxsplit=1) for line in group.read("memory.stat").splitlines())
    return max((group.number(files.usage) or 0) - sum(int(stat.get(name, 0)) for name in files.page_cache), 0)
