"""How many CPUs and cores this process may really use: what the scheduler allows, not what the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from .cgroups import OWN_GROUPS, ROOT, ControlGroup, control_groups


def usable_cores() -> int:
    """Physical cores that this process may use: the number of threads that should compute. At most `usable_cpus()`.

    Two hardware threads of a core (SMT) share its multiplication units and its first two levels of cache. The second
    one serves the processes around the model better.
    """
    return min(usable_cpus(), physical_cores(_allowed_cpus()))


def physical_cores(cpus: Iterable[int], folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that these CPUs belong to. A CPU whose siblings are unknown counts as a core."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (folder / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = ""
        cores.add(siblings or str(cpu))
    return len(cores)


def usable_cpus() -> int:
    """CPUs of the affinity mask, or fewer where a cgroup's CPU quota (v1 or v2) allows less; at least 1. Each hardware
    thread of a core is a CPU."""
    allowed, quota = len(_allowed_cpus()), cgroup_quota()
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cgroup_quota(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> float | None:
    """The least CPU quota, in cores, of this process' cgroup and of those around it; None: no limit, or no cgroups."""
    quotas = [_quota(group) for group in control_groups("cpu", root, own_groups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: ControlGroup) -> float | None:
    if group.version == 2:
        quota, _, period = group.read("cpu.max").strip().partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    allowed, within = group.number("cpu.cfs_quota_us"), group.number("cpu.cfs_period_us")
    return allowed / within if allowed is not None and within and allowed > 0 else None
