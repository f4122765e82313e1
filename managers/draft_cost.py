"""The time of steps with drafts, and the number of drafts that is worth it.

A decode step of one token takes the time 1. Each further token adds a constant, and so do drafts, however many they
are. Reading the weights takes most of a small step, so one more token adds little. How little depends on the processor
and the weights, so a factor for the time of drafts is learned from the steps themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

TOKEN_TIME, LATE_TOKEN_TIME = 0.06, 0.1
"""What one more token adds to a step, up to 8 tokens and beyond. From there on, products limit more than reading does.
On two cores of Zen 5, 0.02 (compact bfloat16) to 0.08 (4 bits), and beyond 0.09 to 0.14 (docs/log.md)."""
DRAFTS_TIME = 0.1
"""What drafts add to a step, however many they are."""
MIN_GAIN = 1.05
"""Drafts are proposed if they promise so many times the tokens per second of a step without any."""
_MEMORY = 0.98
"""The weight of a step with drafts shrinks by this factor with each later one."""
_PRIOR_TIME = 2.0
"""The constants above count as much as steps in which drafts have added this time."""
_FORGETTING = 0.001
"""The share of what was learned that each step without drafts forgets. So drafts that were too expensive are tried
again."""
_SMOOTHING = 0.1
_MOST, _LEAST = 4.0, 0.1
"""Bounds of the factor, so that a few disturbed steps do not count much."""


def step_time(num_tokens: int) -> float:
    """The time of a decode step."""
    return 1 + TOKEN_TIME * min(num_tokens - 1, 7) + LATE_TOKEN_TIME * max(num_tokens - 8, 0)


def added_time(num_reqs: int, num_tokens: int) -> float:
    """The time that drafts add to a step of `num_tokens` tokens, one for each request and all drafts."""
    return step_time(num_tokens) - step_time(num_reqs) + DRAFTS_TIME


class DraftCost:
    """Learns how much more time drafts take than the constants say."""

    def __init__(self) -> None:
        self._token_s: float | None = None
        """Seconds of a step of one token, a moving average."""
        self._expected = self._measured = _PRIOR_TIME
        """The time that drafts have added: by the constants, and as measured."""

    @property
    def factor(self) -> float:
        """The measured time that drafts add, as a multiple of the expected time."""
        return max(self._measured / self._expected, _LEAST)

    def observe(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        """A decode step took so long."""
        if num_tokens == num_reqs:
            token_s = seconds / step_time(num_reqs)
            before = self._token_s or token_s
            self._token_s = before + (min(token_s, 2 * before) - before) * _SMOOTHING
            self._measured += (self._expected - self._measured) * _FORGETTING
        elif self._token_s:  # a coarse clock may say 0
            expected = added_time(num_reqs, num_tokens)
            measured = seconds / self._token_s - step_time(num_reqs)
            self._expected = self._expected * _MEMORY + expected
            self._measured = self._measured * _MEMORY + min(max(measured, 0.0), _MOST * expected)


def choose_counts(guesses: Sequence[tuple[float, int]], max_drafts: int, factor: float) -> list[int]:
    """Choose how many drafts each request of a step gets, for the highest expected number of tokens per second.

    Args:
        guesses: for each request, the probability that a draft is right if those before it are, and the most drafts
        max_drafts: the most drafts of all requests together
        factor: that of DraftCost
    """
    num_reqs = len(guesses)
    base = num_reqs / step_time(num_reqs)
    least = base * factor * TOKEN_TIME
    values = []
    for index, (share, limit) in enumerate(guesses):
        value = share  # the probability that a draft and all before it are right
        for _ in range(limit):
            if value <= least:  # it takes more time than it is worth, and so do those after it
                break
            values.append((value, index))
            value *= share
    values.sort(reverse=True)
    counts, chosen = [0] * num_reqs, [0] * num_reqs
    expected, best = float(num_reqs), base * MIN_GAIN
    for number, (value, index) in enumerate(values[:max_drafts], start=num_reqs + 1):
        expected += value
        counts[index] += 1
        rate = expected / (step_time(num_reqs) + factor * added_time(num_reqs, number))
        if rate > best:
            best, chosen = rate, counts.copy()
    return chosen
