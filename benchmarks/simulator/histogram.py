"""A histogram of durations in bounded memory, with quantiles."""

from __future__ import annotations

import math

import numpy as np

_LOWEST_S = 1e-6
_HIGHEST_S = 1e7
_RATIO = 1.005


class LogHistogram:
    """Counts durations in seconds in bins that grow by 0.5 %. So a quantile is exact to 0.25 %, at any count.

    A duration below a microsecond counts as one microsecond.
    """

    def __init__(self) -> None:
        num_bins = math.ceil(math.log(_HIGHEST_S / _LOWEST_S) / math.log(_RATIO)) + 1
        self.counts = np.zeros(num_bins, dtype=np.int64)
        self.count = 0
        self.max_s = 0.0

    def add(self, value_s: float) -> None:
        self.counts[
            min(int(math.log(max(value_s, _LOWEST_S) / _LOWEST_S) / math.log(_RATIO)), len(self.counts) - 1)
        ] += 1
        self.count += 1
        self.max_s = max(self.max_s, value_s)

    def add_all(self, values_s: np.ndarray) -> None:
        """Count durations: float64 [n]."""
        if not len(values_s):
            return
        bins = (np.log(np.maximum(values_s, _LOWEST_S) / _LOWEST_S) / math.log(_RATIO)).astype(np.int64)
        np.add.at(self.counts, np.minimum(bins, len(self.counts) - 1), 1)
        self.count += len(values_s)
        self.max_s = max(self.max_s, float(values_s.max()))

    def quantile(self, share: float) -> float | None:
        """The duration that a `share` of all durations does not exceed; None without durations."""
        if not self.count:
            return None
        at = int(np.searchsorted(np.cumsum(self.counts), max(share * self.count, 1)))
        return min(_LOWEST_S * _RATIO ** (at + 0.5), self.max_s)

    def cdf(self) -> tuple[np.ndarray, np.ndarray]:
        """The durations in seconds that occur, and for each the share of durations that are not longer."""
        used = np.flatnonzero(self.counts)
        return _LOWEST_S * _RATIO ** (used + 0.5), np.cumsum(self.counts[used]) / max(self.count, 1)
