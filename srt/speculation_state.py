"""How many drafts the scheduler has verified, and how many of them were right."""

from __future__ import annotations

import msgspec


class SpeculationState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, or in a part of the time since then."""

    num_verifications: int = 0
    """How often a step verified drafts of a request."""
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    """Right drafts that became output. Those after the end of a request do not count."""

    def since(self, earlier: SpeculationState) -> SpeculationState:
        """The counts since `earlier`."""
        return SpeculationState(
            num_verifications=self.num_verifications - earlier.num_verifications,
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_accepted_drafts=self.num_accepted_drafts - earlier.num_accepted_drafts,
        )

    @property
    def accept_length(self) -> float:
        """Average tokens that a request gets from a step that verifies its drafts: 1 and the accepted drafts."""
        return 1 + self.num_accepted_drafts / max(self.num_verifications, 1)

    @property
    def accept_rate(self) -> float:
        """The share of drafts that were accepted."""
        return self.num_accepted_drafts / max(self.num_drafts, 1)
