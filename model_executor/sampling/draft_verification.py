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
from ..step import Choices, Int32Array


class Verified(NamedTuple):
    """The accepted choices of a step with N choices for R rows. Rows follow one another."""

    tokens: Int32Array
    """[sum(num_tokens)]. A row with invalid logits ends with INVALID_TOKEN."""
    num_tokens: Int32Array
    """[R], at least 1 and at most 1 + the number of drafts"""
    starts: list[int]
    """[R], index in [N] of each row's first choice"""

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
    return Verified(np.array(accepted, np.int32), np.array(num_tokens, np.int32), starts)
