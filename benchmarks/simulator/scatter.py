"""The scatter of the times of steps: how far equal steps of a recorded run were from one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterable


class Scatter:
    """The seconds of recorded steps divided by their fitted cost, in the order of the steps.

    A simulated step takes its cost times the ratio of the recorded step at the same place among the extend steps or the
    decode steps. After the last ratio comes the first one again.
    """

    def __init__(self, extends: Iterable[float], decodes: Iterable[float]) -> None:
        self._decodes = itertools.cycle(decodes)
        self._extends = itertools.cycle(extends)

    def next(self, *, is_extend: bool) -> float:
        """The ratio of the next step; 1 if no such step was recorded."""
        return next(self._extends if is_extend else self._decodes, 1.0)
