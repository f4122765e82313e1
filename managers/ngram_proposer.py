"""Drafts from a request's own tokens: what followed the last occurrence of its newest tokens.

Texts that repeat parts of their prompt have such drafts: summaries, edits of code, answers with quotations. The method
is prompt lookup (Saxena, "Prompt Lookup Decoding", 2023).

How many drafts a step gets is decided by what they bring. Each request learns how often its drafts were right, for
repetitions of several lengths. It also learns when it proposes none, because a guess can be compared with the tokens
that a step without drafts returns. The proposer learns how much longer a step takes with drafts. Those drafts are
proposed that raise the expected number of tokens per second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..srt.arrays import Int32Array
from ..srt.server_args import ServerArgs
from ..srt.settings.scheduler import MAX_VERIFIED_TOKENS
from .draft_cost import DraftCost, choose_counts
from .req import Req
from .request_queues import RequestQueues

MAX_MATCH = 16
"""Longer repetitions are as good as this one."""
MAX_PLACES = 1024
"""The last occurrences of the newest token that are compared. A long text of equal tokens would take milliseconds."""
_CLASSES = (1, 2, 4, 8)
"""The longest repetition of each class of lengths; another class has the longer ones."""
_PRIORS = (0.15, 0.3, 0.5, 0.7, 0.85)
"""The share of right drafts of each class before any was seen."""
_PRIOR_WEIGHT = 5.0
"""Of a prior, in drafts."""
_MEMORY = 0.9
"""The weight of a draft shrinks by this factor with each later one of its class."""
_MAX_SHARE = 0.98


def make_proposer(server_args: ServerArgs, queues: RequestQueues) -> NgramProposer | None:
    """The proposer of these settings for the requests in `queues`; None: there are no drafts."""
    if server_args.speculative_algorithm is None:
        return None
    proposer = NgramProposer(server_args.speculative_num_draft_tokens, MAX_VERIFIED_TOKENS)
    queues.on_end.append(proposer.forget)
    return proposer


class NgramProposer:
    """The Proposer of all requests of a scheduler. `forget` must be called when a request ends."""

    def __init__(self, max_drafts: int, max_tokens: int) -> None:
        """`max_drafts`: most drafts of a request in a step. `max_tokens`: most tokens of a step with drafts, one for
        each request and all drafts."""
        self._max_drafts = max_drafts
        self._max_tokens = max_tokens
        self._histories: dict[Req, _History] = {}
        self._cost = DraftCost()

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Sequence[int]]:
        if len(reqs) >= self._max_tokens:
            return [()] * len(reqs)
        guesses = [
            self._history(req).guess(min(limit, self._max_drafts)) if limit > 0 else _NO_GUESS
            for req, limit in zip(reqs, limits, strict=True)
        ]
        chances = [(guess.share, guess.limit) for guess in guesses]
        counts = choose_counts(chances, self._max_tokens - len(reqs), self._cost.factor)
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    def observe(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        self._cost.observe(num_reqs, num_tokens, seconds)

    def forget(self, req: Req) -> None:
        self._histories.pop(req, None)

    def _history(self, req: Req) -> _History:
        """The history of a request, up to its newest token."""
        history = self._histories.get(req)
        if history is None:
            history = self._histories[req] = _History(req.prompt_ids, self._max_drafts)
        history.extend(req.output_ids)
        return history


class Guess(NamedTuple):
    """The tokens that may come next."""

    tokens: list[int]
    share: float
    """The share of such guesses that were right, each if those before it were."""
    limit: int
    """The most of them that may be proposed."""


_NO_GUESS = Guess([], 0.0, 0)


class _History:
    """The tokens of a request, and how good its guesses were."""

    def __init__(self, prompt_ids: Int32Array, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._prompt_len = self._len = len(prompt_ids)
        self._ids = np.empty(2 * len(prompt_ids) + 256, np.int32)
        self._ids[: len(prompt_ids)] = prompt_ids
        self._guess: list[int] = []
        """The last guess, if it was not compared with the tokens that came."""
        self._class = 0
        """Its class."""
        self._right = [share * _PRIOR_WEIGHT for share in _PRIORS]
        self._total = [_PRIOR_WEIGHT] * len(_PRIORS)

    def extend(self, output_ids: Sequence[int]) -> None:
        """Append the output tokens that are new, and compare the last guess with them."""
        new = output_ids[self._len - self._prompt_len :]
        if not new:
            return
        self._rate(new)
        end = self._len + len(new)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.empty(end, np.int32)))
        self._ids[self._len : end] = new
        self._len = end

    def guess(self, limit: int) -> Guess:
        """Guess the next tokens. `limit`: the most that may be proposed."""
        start, length = find_repetition(self._ids[: self._len])
        if not length:
            self._guess = []
            return _NO_GUESS
        # One more than may be proposed, to compare with the token after all drafts. A repetition that reaches its own
        # beginning goes on in circles.
        self._guess = self._ids[start + np.arange(self._max_drafts + 1) % (self._len - start)].tolist()
        self._class = bisect_left(_CLASSES, length)
        share = min(self._right[self._class] / self._total[self._class], _MAX_SHARE)
        return Guess(self._guess, share, limit)

    def _rate(self, tokens: Sequence[int]) -> None:
        """Compare the last guess with the tokens that came, up to the first wrong one."""
        right, total = self._right, self._total
        for guessed, token in zip(self._guess, tokens, strict=False):
            right[self._class] = right[self._class] * _MEMORY + (guessed == token)
            total[self._class] = total[self._class] * _MEMORY + 1
            if guessed != token:
                break
        self._guess = []


def find_repetition(ids: Int32Array) -> tuple[int, int]:
    """Find the longest repetition of the last tokens, up to MAX_MATCH, and among equals the last one.

    It is one of the last MAX_PLACES repetitions of the last token.

    Args:
        ids: int32 [n]

    Returns:
        the index of the token after it, and its length; (0, 0) if there is none
    """
    last = len(ids) - 1
    ends: npt.NDArray[np.intp] = np.flatnonzero(ids[:last] == ids[last])[-MAX_PLACES:]
    if not len(ends):
        return 0, 0
    length = 1
    while length < MAX_MATCH:
        longer = ends[ends >= length]
        longer = longer[ids[longer - length] == ids[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1, length
