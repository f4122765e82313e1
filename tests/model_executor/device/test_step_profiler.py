"""The trace of a profile is whole, or an error says that it could not be written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tercet.model_executor.device.step_profiler import StepProfiler


@pytest.fixture
def profiler() -> StepProfiler:
    profiler = StepProfiler(cpu=True, gpu=False, record_shapes=False, with_stack=False)
    with profiler.span("a step"):
        pass
    profiler.stop()
    return profiler


def test_a_trace_has_the_spans_and_is_the_only_file(profiler: StepProfiler, tmp_path: Path) -> None:
    path = tmp_path / "x.trace.json.gz"
    profiler.write(path)
    assert "a step" in {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_and_leaves_no_file(profiler: StepProfiler, tmp_path: Path) -> None:
    (tmp_path / ".x.json.gz.json.tmp").symlink_to("/dev/full")  # torch writes there first
    with pytest.raises(OSError, match="torch could not write it; the disk may be full"):
        profiler.write(tmp_path / "x.json.gz")
    assert not list(tmp_path.iterdir())
