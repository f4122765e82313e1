"""The tokens of an extend step whose final hidden states are wanted, and what each of them is wanted for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..step import Choices, StepInputs

Places = npt.NDArray[np.int64]


class WantedTokens(NamedTuple):
    """A token may be wanted for several uses. The last layer computes it once."""

    at: Places
    """[wanted], the index of each in the step"""
    ranks: Places | None = None
    """[sum(lens)], for each use in order, the indices of its tokens in `at`. None: only the next tokens are wanted."""
    lens: tuple[int, ...] = ()
    """The tokens of each use: the choices of next tokens, prompt scores, hidden sums, hidden states"""


def wanted_tokens(step: StepInputs, choices: Choices) -> WantedTokens:
    """The tokens that this extend step wants. `choices`: of its next tokens."""
    if not step.has_extras:
        return WantedTokens(choices.at)
    uses = [
        [choices.at],
        _ranges((score.start, len(score.targets)) for score in step.prompt_scores),
        _ranges((one.start, one.length) for one in step.hidden_sums),
        _ranges((one.start, one.length) for one in step.hidden_states),
    ]
    at, ranks = np.unique(np.concatenate(list(chain.from_iterable(uses))), return_inverse=True)
    return WantedTokens(at, ranks, tuple(sum(map(len, places)) for places in uses))


def _ranges(spans: Iterable[tuple[int, int]]) -> list[Places]:
    """The integers from `start` on, `length` of them, for each span."""
    return [np.arange(start, start + length, dtype=np.int64) for start, length in spans]
