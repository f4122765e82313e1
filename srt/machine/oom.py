"""Kills by the kernel because memory was short."""

from __future__ import annotations

from pathlib import Path

_VMSTAT = Path("/proc/vmstat")


def num_oom_kills() -> int | None:
    """Processes that the kernel has killed for memory since its start, in control groups too. None: it does not tell.

    It counts the whole machine, so a change says that a kill of ours may have been one of these.
    """
    try:
        for line in _VMSTAT.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None
