"""When requests arrive: all at once, at random at a mean rate, or as a trace says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds after the start, float64 [count], the first at 0.

    `rate`: requests a second in the mean; inf: all at once. Gaps are gamma distributed with shape `burstiness` and mean
    1 / rate: 1 is a Poisson process, less comes in bursts (the gaps' variance is mean squared / burstiness), more is
    more regular. Raises ValueError for a rate or a burstiness that is not positive.
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
    """Seconds after the start, float64 [n], of requests in the order of their timestamps; `slowdown` stretches them.

    Raises ValueError when a timestamp is missing, the order is wrong or `slowdown` is not positive.
    """
    if not 0 < slowdown < math.inf:
        raise ValueError(f"the slowdown factor must be positive and finite, got {slowdown}")
    if any(one is None for one in timestamps_s):
        raise ValueError("this dataset has no timestamps; only mooncake has them")
    times = np.array(timestamps_s, dtype=np.float64)
    if times.size and (np.diff(times) < 0).any():
        raise ValueError("timestamps must not decrease")
    return (times - times[0]) * slowdown if times.size else times
