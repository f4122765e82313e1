"""Reads the device's busy and idle time from a torch profiler trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Event categories that are device work, in torch's traces for CUDA and ROCm."""
HOST_GAP_US = 5.0
"""A longer gap between two operations is the host's. Between two nodes of a CUDA graph are 0.7 to 1.3 us (estimated),
which no host can avoid: with 172 nodes they are 12 to 20 % of a short step."""


@dataclass(frozen=True)
class DeviceActivity:
    """The device's activity between the start of its first and the end of its last operation."""

    busy_s: float
    """Seconds with at least one running operation."""
    span_s: float
    num_operations: int
    host_gaps_s: float
    """Seconds of gaps longer than HOST_GAP_US, in which the device waited for the host."""
    num_host_gaps: int
    by_name_s: dict[str, float]
    """Seconds of each kernel, the longest first. Overlapping kernels both count."""

    @property
    def idle_share(self) -> float:
        """Share of the time without an operation, the short gaps between the nodes of a graph included."""
        return 1 - self.busy_s / self.span_s

    @property
    def host_idle_share(self) -> float:
        """Share of the time in which the device waited for the host."""
        return self.host_gaps_s / self.span_s


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace from `export_chrome_trace`, compressed or not."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def device_activity(events: Iterable[Mapping[str, Any]]) -> DeviceActivity | None:
    """The device's activity; None for a trace without device operations, such as a trace of a CPU."""
    work = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_WORK
    )
    if not work:
        return None
    by_name: dict[str, float] = {}
    busy, end = 0.0, work[0][0]
    host_gaps: list[float] = []
    for start, stop, name in work:
        if start - end > HOST_GAP_US:
            host_gaps.append(start - end)
        by_name[name] = by_name.get(name, 0.0) + (stop - start) / 1e6
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    longest = dict(sorted(by_name.items(), key=lambda item: -item[1]))
    span = max(end - work[0][0], 1e-9)
    return DeviceActivity(busy / 1e6, span / 1e6, len(work), sum(host_gaps) / 1e6, len(host_gaps), longest)
