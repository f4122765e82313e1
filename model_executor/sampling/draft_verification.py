"""Which drafts of a step were right, and so which of its choices are the next tokens of the requests.

A step chooses a token after each draft as if the draft were known to be right: with the same logits, the same
parameters and the same random number as a step without drafts. So the accepted tokens are those that a server without
drafts returns, also with a temperature. Rejection sampling (Leviathan et al., "Fast inference from transformers via
speculative decoding", 2023) would keep only their distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...srt.logprobs import Logprobs
from ..step import NO_DRAFT, Choices, Int32Array


class Verified(NamedTuple):
    """The accepted choices of a step with N choices for R rows. Rows follow one another."""

    tokens: Int32Array
    """[sum(num_tokens)]. A row with invalid logits ends with INVALID_TOKEN."""
    num_tokens: Int32Array
    """[R], at least 1 and at most 1 + the number of drafts"""
    starts: list[int]
    """[R], index in [N] of each row's first choice"""
    rows: Int32Array
    """[R], the row of each"""

    def newest(self) -> npt.NDArray[np.int64]:
        """[R], the last token of each row, or 0 for an invalid one (see NewestTokens)."""
        return np.maximum(self.tokens[np.cumsum(self.num_tokens) - 1], 0).astype(np.int64)

    def merge(self, logprobs: Mapping[int, Logprobs]) -> dict[int, Logprobs]:
        """The log probabilities of the tokens of each row, by its index in [R]. `logprobs`: those of some choices, by
        their index in [N]: all choices of a row or none."""
        found = {}
        for place, (start, length) in enumerate(zip(self.starts, self.num_tokens.tolist(), strict=True)):
            if start in logprobs:
                found[place] = Logprobs.concat([logprobs[start + i] for i in range(length)])
        return found


class EarlierDrafts(NamedTuple):
    """The drafts before n of the N choices of a step. A choice follows them as if they were known to be right."""

    drafts: Int32Array
    """[N], see `Choices`"""
    lines: npt.NDArray[np.int64]
    """[n], index of each choice in [N]"""

    def flat(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All drafts before the choices at `places`, indices in [n]. int64 each: index in `places`, and the draft."""
        starts = np.concatenate(([0], np.flatnonzero(self.drafts == NO_DRAFT) + 1))
        ends = self.lines[places]
        firsts = starts[np.searchsorted(starts, ends, side="right") - 1]
        found = [self.drafts[first:end] for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]
        return np.repeat(np.arange(len(places)), ends - firsts), np.concatenate(found).astype(np.int64)


def verify(tokens: Int32Array, choices: Choices) -> Verified:
    """Find the accepted tokens: those of each row up to the first one that differs from its draft.

    Args:
        tokens: int32 [N], the chosen tokens
        choices: N of them, with drafts
    """
    assert choices.drafts is not None
    chosen, drafts, starts = tokens.tolist(), choices.drafts.tolist(), choices.starts.tolist()
    accepted: list[int] = []
    num_tokens = []
    for start in starts:  # few tokens: numpy would take longer
        end = start
        while chosen[end] == drafts[end]:  # the last choice of a row has no draft
            end += 1
        accepted += chosen[start : end + 1]
        num_tokens.append(end + 1 - start)
    rows = choices.rows[choices.starts]
    return Verified(np.array(accepted, np.int32), np.array(num_tokens, np.int32), starts, rows)
