"""The embedding of one request: which hidden states of its prompt are still to be computed, and the sum so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..model_executor.step import HIDDEN_UNIT, HiddenSum
from ..srt.request_options import Pooling


class ReqPooling:
    """It survives a retraction: the tokens that a launched step has pooled are not computed again."""

    def __init__(self, pooling: Pooling, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_pooled = num_prompt_tokens if pooling == "mean" else 1
        self.reusable_len = num_prompt_tokens - self._num_pooled
        """Tokens at the start of the prompt whose KV may come from the cache, because no step has to pool them."""
        self._sum: npt.NDArray[np.int64] | np.int64 = np.int64(0)

    def plan(self, first: int, start: int, end: int) -> HiddenSum | None:
        """What a step pools, if it has positions [start, end) of the prompt.

        `first`: index of position `start` in the step. The result of a planned step always arrives, so the next plan
        goes on behind it.
        """
        begin, end = self.reusable_len, min(end, self._num_prompt_tokens)
        if begin >= end:
            return None
        assert start <= begin
        self.reusable_len = end
        return HiddenSum(first + begin - start, end - begin)

    def add(self, found: npt.NDArray[np.int64]) -> None:
        """Keep the result of a HiddenSum. The sum of integers does not depend on how the prompt was cut into chunks."""
        self._sum = self._sum + found

    def take(self) -> bytes:
        """The embedding, float32 [hidden_size]. All planned steps must have been processed."""
        return (self._sum * (HIDDEN_UNIT / self._num_pooled)).astype(np.float32).tobytes()
