"""The number of CPUs and cores that this process may use, which may be less than the machine has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from .cgroups import OWN_GROUPS, ROOT, ControlGroup, control_groups


def usable_cores() -> int:
    """The number of physical cores that this process may use, at most `usable_cpus()`.

    It is the number of compute threads. The two hardware threads of a core (SMT) share its multiplication units and
    its L1 and L2 caches. So the second one is better left to the other processes of the engine.
    """
    return min(usable_cpus(), physical_cores(_allowed_cpus()))


def physical_cores(cpus: Iterable[int], folder: Path = Path("/sys/devices/system/cpu")) -> int:
    """The number of cores that contain `cpus`. A CPU with unknown siblings counts as a core."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (folder / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = ""
        cores.add(siblings or str(cpu))
    return len(cores)


def usable_cpus() -> int:
    """The number of CPUs (hardware threads) that this process may use, at least 1.

    It is the number of CPUs in the affinity mask, or less if the CPU quota of a control group (v1 or v2) is less.
    """
    allowed, quota = len(_allowed_cpus()), cgroup_quota()
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def _allowed_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cgroup_quota(root: Path = ROOT, own_groups: Path = OWN_GROUPS) -> float | None:
    """The least CPU quota, in CPUs, of the control groups of this process. None: no quota, or no control groups."""
    quotas = [_quota(group) for group in control_groups("cpu", root, own_groups)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: ControlGroup) -> float | None:
    if group.version == 2:
        quota, _, period = group.read("cpu.max").strip().partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    allowed, within = group.number("cpu.cfs_quota_us"), group.number("cpu.cfs_period_us")
    return allowed / within if allowed is not None and within and allowed > 0 else None
