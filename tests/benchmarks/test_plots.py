"""Plots: what is counted, and where the dots are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.benchmarks import plots
from tercet.benchmarks.metrics import Latencies, Timeline

NONE = np.zeros(0)


def dots(picture: str) -> np.ndarray:
    """bool [rows of dots, columns of dots], the top first."""
    lines = [line[11:] for line in picture.splitlines() if any(0x2800 <= ord(char) < 0x2900 for char in line)]
    found = np.zeros((4 * len(lines), 2 * len(lines[0])), dtype=bool)
    for y, line in enumerate(lines):
        for x, char in enumerate(line):
            for row, bits in enumerate(plots._DOTS):
                for column, bit in enumerate(bits):
                    found[4 * y + row, 2 * x + column] = bool(ord(char) - 0x2800 & bit)
    return found


def test_a_line_goes_from_corner_to_corner() -> None:
    picture = plots.draw("title", np.array([2.0, 4.0]), np.array([0.0, 50.0]), 40)
    found = dots(picture)
    assert found[-1, 0] and found[0, -1] and not found[0, 0]
    lines = picture.splitlines()
    assert lines[0].strip() == "title" and lines[1].split()[0] == "50" and lines[-2].split()[0] == "0"
    assert lines[-1].split() == ["2", "4"]
    assert {len(line) for line in lines[1:-1]} == {40}


def test_an_outlier_in_a_column_is_drawn() -> None:
    xs = np.linspace(0, 1, 10_000)
    ys = np.ones(10_000)
    ys[5_000] = 32
    found = dots(plots.draw("", xs, ys, 60))
    assert found[0].sum() == 1 and found[0, found.shape[1] // 2 - 2 : found.shape[1] // 2 + 2].any()


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=30),
    st.integers(1, 120),
)
def test_anything_can_be_drawn(points: list[tuple[float, float]], width: int) -> None:
    xs = np.sort(np.array([x for x, _ in points]))
    ys = np.array([y for _, y in points])
    found = dots(plots.draw("", xs, ys, width))
    assert found.shape[0] == 32
    if points:
        assert found.any()


def test_a_cumulative_distribution() -> None:
    xs, ys = plots.cdf(np.array([3.0, 1.0, 2.0, 2.0]))
    assert xs.tolist() == [1, 2, 2, 3] and ys.tolist() == [0.25, 0.5, 0.75, 1]


def test_throughput_over_time_adds_up() -> None:
    timeline = Timeline(np.array([0.5, 1.0, 39.9, 40.0]), np.array([1, 2, 3, 4]), np.array([0.0]), np.array([40.0]))
    times, rates = plots.throughput(timeline)
    assert times.size == 40 and times[0] == 0.5
    assert rates.sum() == 10 and rates[0] == 1 and rates[-1] == 7
    short = Timeline(np.array([0.1]), np.array([5]), np.array([0.0]), np.array([0.2]))
    times, rates = plots.throughput(short)
    assert times.size == 20 and rates.max() == pytest.approx(500)


def test_concurrency_over_time() -> None:
    timeline = Timeline(NONE, NONE, np.array([0.0, 1.0, 2.0]), np.array([2.0, 3.0, 5.0]))
    times, running = plots.concurrency(timeline)
    assert times.tolist() == [0, 1, 2, 2, 3, 5]
    assert running.tolist() == [1, 2, 1, 2, 1, 0]


def some() -> tuple[Latencies, Timeline]:
    values = np.array([0.1, 0.2, 0.3])
    return Latencies(values, values, values, values, values), Timeline(values, np.ones(3), values - 0.1, values)


def test_the_terminal_shows_what_was_measured() -> None:
    latencies, timeline = some()
    text = plots.terminal_cdfs(latencies, 60)
    assert [name for name in ("End-to-end latency", "TTFT", "TPOT", "ITL") if name in text] == [
        "End-to-end latency", "TTFT", "TPOT", "ITL",
    ]  # fmt: skip
    only_whole = Latencies(np.array([1.0]), NONE, NONE, NONE, NONE)
    assert "TTFT" not in plots.terminal_cdfs(only_whole, 60)
    assert "Output tokens per second" in plots.terminal_timeline(timeline, 60)
    silent = Timeline(NONE, NONE, np.array([0.0]), np.array([1.0]))
    assert "Output tokens" not in plots.terminal_timeline(silent, 60)


def test_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="an optional extra")
    path = tmp_path / "plot.png"
    plots.save_png(path, "title", *some())
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
