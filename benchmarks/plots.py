"""A run in pictures: latencies as cumulative distributions, throughput and concurrency over time; in the terminal
without any library, and as PNG with matplotlib, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .metrics import Latencies, Timeline

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Unicode's braille patterns: the bit of each dot, 4 rows of 2."""
_BLANK = 0x2800
_HEIGHT = 8
_MARGIN = 10
_MOST_BINS = 200
_LONG_NAMES = {"e2el": "End-to-end latency", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}


def terminal_cdfs(latencies: Latencies, width: int) -> str:
    """One plot for each latency that was measured; `width`: columns."""
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


def save_png(path: Path, title: str, latencies: Latencies, timeline: Timeline) -> None:
    """Needs matplotlib. Raises OSError where the file cannot be written."""
    figure_module = importlib.import_module("matplotlib.figure")  # an extra: most installations have none
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
    """Sorted values, and the share of values that are not larger than each."""
    xs = np.sort(values)
    return xs, np.arange(1, xs.size + 1) / xs.size


def throughput(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Middles of bins (s) from the first request to the last answer, and tokens per second in each.

    Bins of a second; smaller ones for a short run, so that there are at least 20.
    """
    end = float(max(timeline.ends_s[-1], timeline.token_s[-1])) or 1e-9
    num_bins = min(_MOST_BINS, max(20, int(end)))
    edges = np.linspace(0.0, end, num_bins + 1)
    tokens, _ = np.histogram(timeline.token_s, bins=edges, weights=timeline.tokens)
    return (edges[1:] + edges[:-1]) / 2, tokens / np.diff(edges)


def concurrency(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Times (s) of every start and end, and the number of requests under way from then on."""
    times = np.concatenate([timeline.ends_s, timeline.starts_s])  # at the same time, ends come first
    steps = np.concatenate([-np.ones(timeline.ends_s.size), np.ones(timeline.starts_s.size)])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(steps[order])


def draw(title: str, xs: np.ndarray, ys: np.ndarray, width: int, top: float | None = None) -> str:
    """A line through points of ascending x >= 0, y >= 0, in braille patterns; from 0 to `top` (None: the largest y)."""
    columns = max(10, width - _MARGIN - 1)
    left, right = (float(xs[0]), float(xs[-1])) if xs.size else (0.0, 1.0)
    high = top if top is not None else (float(ys.max()) if ys.size else 0.0) or 1.0
    cells = np.zeros((_HEIGHT, columns), dtype=np.int32)
    # For every column of dots the values that fall into it: a line from the lowest to the highest.
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
