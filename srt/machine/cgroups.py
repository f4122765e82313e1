"""The control groups (cgroups) that limit this process: its own group, and each group that contains it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class ControlGroup(NamedTuple):
    """A control group: its folder, and the version (1 or 2) of its files."""

    folder: Path
    version: int

    def read(self, name: str) -> str:
        """The text of one of its files; empty if there is no such file."""
        return read_text(self.folder / name)

    def number(self, name: str) -> int | None:
        """The number in one of its files; None if there is no such file, or if its text is "max"."""
        text = self.read(name).strip()
        return int(text) if text.lstrip("-").isdigit() else None


def control_groups(controller: str, root: Path, own_groups: Path) -> list[ControlGroup]:
    """The groups that may limit `controller` ("cpu", "memory"), from this process's own group up to the mount point.

    The mount point is always included: in a container it often is the container's own group, whatever path
    /proc/self/cgroup names.
    """
    own_paths = dict(_own_paths(controller, own_groups))
    groups = []
    for version, mount in ((2, root), (1, _mount_of_version_1(controller, root))):
        folder = mount / own_paths.get(version, "/").lstrip("/")
        while folder != mount:
            groups.append(ControlGroup(folder, version))
            folder = folder.parent
        groups.append(ControlGroup(mount, version))
    return groups


def read_text(path: Path) -> str:
    """The text of a file; empty if it cannot be read. Names of groups in it may have any bytes, as paths may."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def _own_paths(controller: str, own_groups: Path) -> Iterator[tuple[int, str]]:
    """Read (version, path below the mount point) from lines of the form `hierarchy:controllers:path`."""
    for line in read_text(own_groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mount_of_version_1(controller: str, root: Path) -> Path:
    """The mount point of a controller. It may be shared ("cpu,cpuacct"); some systems have no link for each name."""
    together = [mount for mount in sorted(root.glob(f"*{controller}*")) if controller in mount.name.split(",")]
    return together[0] if together else root / controller
