"""The output that each request must get, whatever schedule, cache and weights it had."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hash_grammar import allowed_after

from fakes import ADAPTER_STEP, WEIGHTS_STEP, choose, next_token

SEED = 1
NO_IDS: frozenset[int] = frozenset()


class Answer:
    """The right output of one request. Each of its tokens is of the weights in use when it was computed."""

    def __init__(
        self, prompt: Sequence[int], regex: str | None, weights: int, vocab_size: int, adapter: int = 0
    ) -> None:
        """`regex`: the seed of its HashGrammar. `weights`: the version in use. `adapter`: the number of its adapter."""
        self._shift = adapter * (ADAPTER_STEP // WEIGHTS_STEP)
        self._prompt = list(prompt)
        self._grammar = None if regex is None else int(regex)
        self._vocab_size = vocab_size
        self._weights = [(0, weights + self._shift)]
        """(position in the output, version of the weights with the adapter from there on), in order."""

    def on_weights(self, num_tokens: int, weights: int) -> None:
        """Its output has `num_tokens` tokens, and other weights compute the next ones."""
        self._weights.append((num_tokens, weights + self._shift))

    def on_restart(self, num_heard: int) -> None:
        """The client has `num_heard` tokens. What the engine had computed after them is computed again."""
        self._weights = [(min(position, num_heard), weights) for position, weights in self._weights]

    def weights_of(self, position: int) -> int:
        """The version that has computed a token of the output."""
        return next(weights for start, weights in reversed(self._weights) if start <= position)

    @property
    def all_weights(self) -> set[int]:
        """The versions in use during its life. The prompt may have been computed by any of them."""
        return {weights for _, weights in self._weights}

    def tokens(self, length: int) -> list[int]:
        """The first `length` tokens of the output."""
        output: list[int] = []
        changes = [*self._weights, (length, 0)]
        for (_, weights), (end, _) in pairwise(changes):
            while len(output) < min(end, length):
                token = next_token([*self._prompt, *output], SEED, self._vocab_size, weights)
                if self._grammar is not None:
                    token = choose(token, allowed_after(output, self._grammar, self._vocab_size, NO_IDS))
                output.append(token)
        return output
