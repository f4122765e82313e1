"""What proposes the drafts of decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .req import Req


class Proposer(Protocol):
    """Proposes drafts: guesses of the tokens after a request's newest one."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> Sequence[Sequence[int]]:
        """The drafts of each request of a decode step, at most as many as its limit.

        With overlap, the host may not know the newest token yet.
        """

    def observe(self, num_reqs: int, num_tokens: int, seconds: float) -> None:
        """A decode step of so many requests took so long. `num_tokens`: their newest tokens and all drafts."""
