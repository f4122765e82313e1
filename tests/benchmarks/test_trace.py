from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tercet.benchmarks.trace import device_activity, read_events


def operation(start_us: float, duration_us: float, name: str = "k", category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us}


def test_overlapping_operations_count_once_and_gaps_are_idle() -> None:
    events = [
        operation(130, 20, "copy", "gpu_memcpy"),  # out of order, as traces may be
        operation(100, 10, "a"),
        operation(105, 10, "b"),  # overlaps
        operation(106, 2, "a"),  # inside another
        operation(0, 1000, "cudaLaunchKernel", "cuda_runtime"),  # the host's
        {"ph": "f", "cat": "kernel", "name": "arrow", "ts": 0},
    ]
    activity = device_activity(events)
    assert activity is not None
    assert activity.busy_s == pytest.approx(35e-6)
    assert activity.span_s == pytest.approx(50e-6)
    assert activity.idle_share == pytest.approx(0.3)
    assert activity.num_operations == 4
    assert list(activity.by_name_s) == ["copy", "a", "b"]
    assert activity.by_name_s["a"] == pytest.approx(12e-6)


def test_gaps_between_graph_nodes_are_not_the_hosts() -> None:
    nodes = [operation(11.0 * i, 10) for i in range(10)]  # 1 us between two nodes
    later = [operation(150 + 11.0 * i, 10) for i in range(10)]  # after 41 us without work
    activity = device_activity([*nodes, *later])
    assert activity is not None
    assert activity.span_s == pytest.approx(259e-6)
    assert activity.idle_share == pytest.approx((9 + 41 + 9) / 259)
    assert activity.host_idle_share == pytest.approx(41 / 259)
    assert activity.num_host_gaps == 1
    assert device_activity([operation(0, 10), operation(15, 10)]).host_idle_share == 0


def test_a_trace_without_a_device_has_no_activity() -> None:
    assert device_activity([operation(0, 5, category="cpu_op")]) is None


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_both_kinds_of_file_are_read(tmp_path: Path, name: str) -> None:
    data = json.dumps({"traceEvents": [operation(0, 1)]}).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_events(tmp_path / name) == [operation(0, 1)]
