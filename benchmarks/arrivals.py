"""Arrival times of requests: all at once, random with a given mean rate, or taken from a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Random arrival times in seconds after the start, float64 [count]. The first is 0.

    `rate`: mean number of requests per second; inf: all at once. The gaps follow a gamma distribution with shape
    `burstiness`, mean 1 / rate and variance mean ** 2 / burstiness. A burstiness of 1 gives a Poisson process, smaller
    values give bursts, larger ones more regular gaps. Raises ValueError for a rate or burstiness that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"the request rate must be positive (inf sends all at once), got {rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness must be positive and finite, got {burstiness}")
    times = np.zeros(count)
    if count > 1 and rate != math.inf:
        gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count - 1)
        times[1:] = np.cumsum(gaps)
    return times


def trace_times(timestamps_s: Sequence[float | None], slowdown: float) -> np.ndarray:
    """Arrival times of a trace in seconds after the start, float64 [n]. `slowdown` multiplies them.

    Raises ValueError when a timestamp is missing, timestamps decrease, or `slowdown` is not positive.
    """
    if not 0 < slowdown < math.inf:
        raise ValueError(f"the slowdown factor must be positive and finite, got {slowdown}")
    if any(timestamp is None for timestamp in timestamps_s):
        raise ValueError("this dataset has no timestamps; only mooncake has them")
    times = np.array(timestamps_s, dtype=np.float64)
    if times.size and (np.diff(times) < 0).any():
        raise ValueError("timestamps must not decrease")
    return (times - times[0]) * slowdown if times.size else times
