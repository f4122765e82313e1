"""What speculative decoding has brought: the drafts of the scheduler, and how many were right."""

from __future__ import annotations

import msgspec


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True):
    """What speculative decoding has brought since the start."""

    num_verifications: int = 0
    """How often a step verified drafts of a request."""
    num_drafts: int = 0
    num_accepted_drafts: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens that a request gets from a step that verifies drafts of it, on average: 1 and the accepted drafts."""
        return 1 + self.num_accepted_drafts / max(self.num_verifications, 1)

    @property
    def accept_rate(self) -> float:
        """The share of drafts that were accepted."""
        return self.num_accepted_drafts / max(self.num_drafts, 1)
