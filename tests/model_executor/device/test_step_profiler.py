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


class FullDisk:
    """A recording whose trace does not fit: torch raises nothing. It may leave a file that it has not renamed."""

    def __init__(self, trace: str, *, is_renamed: bool) -> None:
        self._trace = trace
        self._end = "" if is_renamed else ".tmp"

    def export_chrome_trace(self, path: str) -> None:
        Path(path + self._end).write_text(self._trace)


@pytest.mark.parametrize("is_renamed", [True, False])
@pytest.mark.parametrize("num_lost", [1, 20, 100])
def test_a_full_disk_is_an_error_and_leaves_no_file(
    profiler: StepProfiler, tmp_path: Path, num_lost: int, is_renamed: bool
) -> None:
    path = tmp_path / "x.json.gz"
    profiler.write(path)
    trace = gzip.decompress(path.read_bytes()).decode().rstrip()
    path.unlink()
    profiler._profile = FullDisk(trace[:-num_lost], is_renamed=is_renamed)  # type: ignore[assignment]
    with pytest.raises(OSError, match="torch could not write it; the disk may be full"):
        profiler.write(path)
    assert not list(tmp_path.iterdir())
