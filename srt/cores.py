"""How many processor cores this process may really use: what the scheduler allows, not what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores of the affinity mask, or fewer where a cgroup's CPU quota (v1 or v2) allows less; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(_CGROUP_ROOT, _OWN_CGROUPS)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def cgroup_quota(root: Path, own_cgroups: Path) -> float | None:
    """The least CPU quota, in cores, of this process' cgroup and of those around it; None: no limit, or no cgroups."""
    quotas: list[float] = []
    for line in _read(own_cgroups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, read_quota = root, _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read_quota = root / controllers, _quota_v1
            if not mount.exists():
                mount = root / "cpu"
        else:
            continue
        folder = mount / path.lstrip("/")
        while True:  # a container often shows its own cgroup at the mount point, so look there in any case
            quota = read_quota(folder)
            if quota is not None:
                quotas.append(quota)
            if folder in (mount, folder.parent):
                break
            folder = folder.parent
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
