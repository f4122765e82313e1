"""What PrefixStates knows about the states of recurrent layers of a request (prefix_states.py)."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from ..mem_cache.base_prefix_cache import CacheNode


class SavedAt(Enum):
    """Where a state was saved."""

    PREFIX = auto()
    """At a length of the prompt that others may have in common with it."""
    CHUNK = auto()
    """At the end of a chunk. The next state of the request takes its place, also in the cache."""
    NEWEST = auto()
    """At the newest token of a request that decodes or loses its row."""


class TemporaryState(NamedTuple):
    """A state of a CHUNK that the cache has."""

    node: CacheNode
    row: int


class ReqStates:
    """The saved states of a request with a row. Only PrefixStates changes it."""

    __slots__ = ("branch_len", "row", "saved_at", "saved_len", "temporary")

    def __init__(self, branch_len: int) -> None:
        self.branch_len = branch_len
        """Where other requests branch off from its prompt."""
        self.saved_len = 0
        """Tokens of its newest saved state that the cache does not have yet; 0: there is none."""
        self.row: int | None = None
        """The row that it has taken for this state."""
        self.saved_at = SavedAt.NEWEST
        """Where this state was saved."""
        self.temporary: TemporaryState | None = None
        """The last one."""
