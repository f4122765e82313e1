"""Plots of a run: latencies as cumulative distributions, throughput and concurrency over time.

Plots in the terminal need no library. PNG files need matplotlib.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import Latencies, Timeline

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in Unicode's braille patterns, in 4 rows of 2 dots."""
_BLANK = 0x2800
_HEIGHT = 8
_MARGIN = 10
_MAX_BINS = 200
_LONG_NAMES = {"e2el": "End-to-end latency", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


def terminal_cdfs(latencies: Latencies, width: int) -> str:
    """One plot for each measured latency. `width`: terminal columns."""
    plots = []
    for name, values in _measured(latencies):
        xs, ys = cdf(values * 1000)
        plots.append(draw(f"{name} (ms), share of {values.size}", xs, ys, width, top=1.0))
    return "\n".join(plots)


def terminal_timeline(timeline: Timeline, width: int) -> str:
    plots = []
    if timeline.token_s.size:
        times, rates = throughput(timeline)
        plots.append(draw("Output tokens per second, over seconds", times, rates, width))
    times, running = concurrency(timeline)
    plots.append(draw("Concurrent requests, over seconds", times, running, width))
    return "\n".join(plots)


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_png(value: str) -> None:
    """Raises ValueError if this value of `--plot` cannot be a PNG file."""
    if not value.endswith(".png"):
        raise ValueError(f"--plot must name a .png file, got {value!r}")
    if not has_matplotlib():
        raise ValueError("--plot FILE needs matplotlib (pip install 'tercet[plot]'); --plot without a file does not")


def save_png(path: Path, title: str, latencies: Latencies, timeline: Timeline) -> None:
    """Writes a PNG file. Needs matplotlib. Raises OSError if the file cannot be written."""
    figure_module = importlib.import_module("matplotlib.figure")  # an optional dependency
    figure: Any = figure_module.Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for name, values in _measured(latencies):
        left.step(*cdf(values * 1000), where="post", label=f"{name} ({values.size})")
    left.set(xscale="log", xlabel="ms", ylabel="share of requests (ITL: of tokens)", ylim=(0, 1.02))
    left.grid(True, which="both", alpha=0.3)
    left.legend()
    if timeline.token_s.size:
        right.plot(*throughput(timeline), color="tab:blue")
    right.set_xlabel("s")
    right.set_ylabel("output tokens per second", color="tab:blue")
    right.set_ylim(bottom=0)
    right.grid(True, alpha=0.3)
    beside = right.twinx()
    beside.step(*concurrency(timeline), where="post", color="tab:orange")
    beside.set_ylabel("concurrent requests", color="tab:orange")
    beside.set_ylim(bottom=0)
    figure.savefig(path, format="png", dpi=120)


def cdf(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sorted values, and for each the share of values that are not larger."""
    xs = np.sort(values)
    return xs, np.arange(1, xs.size + 1) / xs.size


def throughput(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """The centres of time bins in seconds, and the tokens per second in each bin.

    The bins cover the time from the first request to the last response. There is one bin for each second, but at least
    20 and at most 200 bins.
    """
    end = float(max(timeline.ends_s[-1], timeline.token_s[-1])) or 1e-9
    num_bins = min(_MAX_BINS, max(20, int(end)))
    edges = np.linspace(0.0, end, num_bins + 1)
    tokens, _ = np.histogram(timeline.token_s, bins=edges, weights=timeline.tokens)
    return (edges[1:] + edges[:-1]) / 2, tokens / np.diff(edges)


def concurrency(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """The times of all starts and ends in seconds, and the number of running requests after each."""
    times = np.concatenate([timeline.ends_s, timeline.starts_s])  # at the same time, ends come first
    steps = np.concatenate([-np.ones(timeline.ends_s.size), np.ones(timeline.starts_s.size)])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(steps[order])


def draw(title: str, xs: np.ndarray, ys: np.ndarray, width: int, top: float | None = None) -> str:
    """Draws a line in braille patterns through points with ascending x >= 0 and y >= 0.

    The y axis goes from 0 to `top` (None: the largest y).
    """
    columns = max(10, width - _MARGIN - 1)
    left, right = (float(xs[0]), float(xs[-1])) if xs.size else (0.0, 1.0)
    high = top if top is not None else (float(ys.max()) if ys.size else 0.0) or 1.0
    cells = np.zeros((_HEIGHT, columns), dtype=np.int32)
    # Each column of dots gets a vertical line from its lowest to its highest value.
    at = ((xs - left) / ((right - left) or 1.0) * (2 * columns - 1)).round().astype(int)
    rows = (ys / high * (4 * _HEIGHT - 1)).round().astype(int)
    before = None
    for column in range(2 * columns):
        inside = rows[np.searchsorted(at, column, "left") : np.searchsorted(at, column, "right")]
        seen = inside.tolist() + ([before] if before is not None else [])
        if not seen:
            continue
        for row in range(min(seen), max(seen) + 1):
            from_top = 4 * _HEIGHT - 1 - row
            cells[from_top // 4, column // 2] |= _DOTS[from_top % 4][column % 2]
        if inside.size:
            before = int(inside[-1])
    lines = [f"{'':{_MARGIN}} {title}"]
    for row, line in enumerate(cells):
        label = {0: _number(high), _HEIGHT - 1: "0"}.get(row, "")
        lines.append(f"{label:>{_MARGIN}} " + "".join(chr(_BLANK + bits) for bits in line.tolist()))
    first, last = _number(left), _number(right)
    lines.append(f"{'':{_MARGIN}} {first}{last:>{columns - len(first)}}")
    return "\n".join(lines) + "\n"


def _measured(latencies: Latencies) -> Sequence[tuple[str, np.ndarray]]:
    named = ((name, getattr(latencies, field)) for field, name in _LONG_NAMES.items())
    return [(name, values) for name, values in named if values.size]


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
