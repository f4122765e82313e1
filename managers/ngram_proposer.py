"""Drafts from a request's own tokens: what followed the last occurrence of its newest tokens.

Texts that repeat parts of their prompt have such drafts: summaries, edits of code, answers with quotations. The method
is prompt lookup (Saxena, "Prompt Lookup Decoding", 2023). A request may also bring a prediction of its output. It
stands between prompt and output, as if it were an earlier answer, and the first guess is its beginning.

How many drafts a step gets is decided by what they bring. Each request learns how often its drafts were right, for
repetitions of several lengths. It also learns when it proposes none, because a guess can be compared with the tokens
that a step without drafts returns. The proposer learns how much longer a step takes with drafts. Those drafts are
proposed that raise the expected number of tokens per second. A guess ends before the first token that the request's
grammar forbids.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np

from ..srt.arrays import Int32Array
from ..srt.io_struct import unpack_ids
from ..srt.server_args import ServerArgs
from ..srt.settings.scheduler import MAX_VERIFIED_TOKENS
from .draft_cost import DraftCost, choose_counts
from .req import Req
from .request_queues import RequestQueues

LENGTHS = (1, 2, 3, 5, 9)
"""The least length of a repetition in each class. Guesses after longer repetitions are right more often."""
_PRIORS = (0.15, 0.3, 0.5, 0.7, 0.85)
"""The share of right drafts of each class before any was seen."""
_PRIOR_WEIGHT = 5.0
"""Of a prior, in drafts."""
_MEMORY = 0.9
"""The weight of a draft shrinks by this factor with each later one of its class."""
_MAX_SHARE = 0.98
_SIZE = 4
"""Bytes of a token."""


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
        counts = self._choose(guesses)
        if any(count and req.grammar is not None for req, count in zip(reqs, counts, strict=True)):
            guesses = [self._allowed(*each) for each in zip(reqs, guesses, counts, strict=True)]
            counts = self._choose(guesses)
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    def observe(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        self._cost.observe(num_reqs, num_tokens, seconds)

    def forget(self, req: Req) -> None:
        self._histories.pop(req, None)

    def _choose(self, guesses: Sequence[Guess]) -> list[int]:
        chances = [(guess.share, guess.limit) for guess in guesses]
        return choose_counts(chances, self._max_tokens - len(guesses), self._cost.factor)

    def _allowed(self, req: Req, guess: Guess, count: int) -> Guess:
        """The part of a guess that the request's grammar allows, of its first `count` tokens."""
        if req.grammar is None:
            return guess
        num_allowed = req.grammar.look_ahead(guess.tokens[:count], len(req.output_ids))
        if num_allowed < count:
            self._histories[req].cut(num_allowed)
        return guess._replace(limit=num_allowed)

    def _history(self, req: Req) -> _History:
        """The history of a request, up to its newest token."""
        history = self._histories.get(req)
        if history is None:
            prediction = unpack_ids(req.options.prediction)
            history = self._histories[req] = _History(req.prompt_ids, prediction, self._max_drafts)
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
    """The tokens of a request, and how good its guesses were.

    The tokens are bytes, because a search in bytes takes few calls. After a step, the weights have displaced code from
    the caches, so each call takes long.
    """

    def __init__(self, prompt_ids: Int32Array, prediction: Int32Array, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._output_start = len(prompt_ids) + len(prediction)
        self._data = bytearray(np.concatenate((prompt_ids, prediction)).astype("<i4").tobytes())
        """All tokens, 4 bytes each."""
        self._guess: list[int] = prediction[: max_drafts + 1].tolist()
        """The last guess, if it was not compared with the tokens that came."""
        self._start = len(prompt_ids)
        """Its place in `_data`, in tokens."""
        self._class = len(LENGTHS) - 1
        """Its class of repetitions."""
        self._goes_on = False
        """Whether all tokens since the last guess were right. Then its repetition is longer now."""
        self._right = [share * _PRIOR_WEIGHT for share in _PRIORS]
        self._total = [_PRIOR_WEIGHT] * len(_PRIORS)

    def extend(self, output_ids: Sequence[int]) -> None:
        """Append the output tokens that are new, and compare the last guess with them."""
        new = output_ids[len(self._data) // _SIZE - self._output_start :]
        if new:
            self._goes_on = self._rate(new)
            self._start += len(new)
            self._data += struct.pack(f"<{len(new)}i", *new)

    def guess(self, limit: int) -> Guess:
        """Guess the next tokens. `limit`: the most that may be proposed."""
        if not (self._goes_on and self._class == len(LENGTHS) - 1):  # otherwise it is as long as any
            self._start, self._class = find_repetition(self._data)
        if self._class < 0:
            self._guess = []
            return _NO_GUESS
        # One more than may be proposed, to compare with the token after all drafts.
        num, start = self._max_drafts + 1, _SIZE * self._start
        found = self._data[start : start + _SIZE * num]
        ids = struct.unpack(f"<{len(found) // _SIZE}i", found)
        # A repetition that reaches its own beginning goes on in circles.
        self._guess = list(islice(cycle(ids), num))
        share = min(self._right[self._class] / self._total[self._class], _MAX_SHARE)
        return Guess(self._guess, share, limit)

    def cut(self, length: int) -> None:
        """The last guess ends there: what follows would never have been proposed, so it is not rated."""
        del self._guess[length:]

    def _rate(self, tokens: Sequence[int]) -> bool:
        """Compare the last guess with the tokens that came, up to the first wrong one. Returns whether it had all."""
        right, total, guess = self._right, self._total, self._guess
        self._guess = []
        for guessed, token in zip(guess, tokens, strict=False):
            right[self._class] = right[self._class] * _MEMORY + (guessed == token)
            total[self._class] = total[self._class] * _MEMORY + 1
            if guessed != token:
                return False
        return len(guess) >= len(tokens)


def find_repetition(data: bytearray) -> tuple[int, int]:
    """Find where the last tokens occurred before: as many of LENGTHS as possible, and the last time.

    Args:
        data: the tokens, 4 bytes each

    Returns:
        the index of the token after them, and the index of their number in LENGTHS; (0, -1) if the last token is new
    """
    end = len(data)
    for index in range(len(LENGTHS) - 1, -1, -1):
        size = _SIZE * LENGTHS[index]
        if size >= end:
            continue
        last = data[end - size :]
        at = data.rfind(last, 0, end - _SIZE)
        while at > 0 and at % _SIZE:  # parts of two tokens
            at = data.rfind(last, 0, at + size - 1)
        if at >= 0:
            return (at + size) // _SIZE, index
    return 0, -1
