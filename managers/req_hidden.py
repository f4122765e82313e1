"""The hidden states of one request: which positions are still to be computed, and what was not sent yet."""

from __future__ import annotations

from ..model_executor.step import Float32Array, HiddenRange


class ReqHidden:
    """The states of all positions of a request but the last: its newest token is the input of no step yet.

    It survives a retraction: the positions that a launched step has computed are not asked for again.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self.reusable_len = 0
        """Tokens at the start whose KV may come from the cache, because a step has computed their states, or will."""
        self._found: list[Float32Array] = []
        self._num_sent = 0

    def resume(self, num_output_tokens: int) -> None:
        """The client has these tokens, and the states before the last of them, from an engine that has died."""
        self.reusable_len = self._num_sent = self._num_states(num_output_tokens)

    def plan(self, first: int, start: int, end: int) -> HiddenRange | None:
        """What a step returns, if it has positions [start, end) of the request.

        `first`: index of position `start` in the step. The result of a planned step always arrives, so the next plan
        goes on behind it.
        """
        begin = self.reusable_len
        if begin >= end:
            return None
        assert start <= begin
        self.reusable_len = end
        return HiddenRange(first + begin - start, end - begin)

    def add(self, found: Float32Array) -> None:
        """Keep the result of a HiddenRange."""
        self._found.append(found)

    def take(self, num_output_tokens: int) -> bytes:
        """The states that were not sent yet, one after the other, float32. `num_output_tokens`: of the request so far.

        A request that has ended may have computed more.
        """
        left = self._num_states(num_output_tokens) - self._num_sent
        taken = []
        while self._found and left > 0:
            taken.append(self._found.pop(0)[:left])
            left -= len(taken[-1])
            self._num_sent += len(taken[-1])
        return b"".join(states.tobytes() for states in taken)

    def _num_states(self, num_output_tokens: int) -> int:
        return self._num_prompt_tokens + max(num_output_tokens - 1, 0)
