"""The layout of what the sampling kernels read besides logits: the table of parameters and the plan of a step.

This module does not import Triton, because the samplers of a CPU use it, too.
"""

from __future__ import annotations

from enum import IntEnum


class Column(IntEnum):
    """Columns of the parameter table, which has a float64 line for each row."""

    TEMPERATURE = 0
    """1 for a greedy row."""
    TOP_K = 1
    """The size of the vocabulary if top-k is off, so that "rank < k" needs no special case."""
    TOP_P = 2
    MAX_GAP = 3
    """min_p as a gap: p >= min_p * p_max is the same as (best logit - logit) / temperature <= -log(min_p)."""
    REPETITION = 4
    FREQUENCY = 5
    PRESENCE = 6
    GREEDY = 7
    """1 for a row that takes its most probable token, else 0."""


class Field(IntEnum):
    """Fields of the plan of a step, which has an int64 line for each line of logits."""

    ROW = 0
    """The line's row in the parameter table."""
    DRAW = 1
    """The bits of the line's random draw, a float64 in [0, 1)."""
    COUNTS = 2
    """The line of the table of token counts; -1: the row has no penalties."""
    BIAS = 3
    """The line of the table of logit biases; -1: none."""
    MASK = 4
    """The line of the token masks; -1: none."""
    EDITED = 5
    """The line of the buffer of edited logits; -1: the logits are not edited."""
    STOPS_START = 6
    """Where the line's suppressed stop tokens start in the list of them."""
    STOPS_END = 7
