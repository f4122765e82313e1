"""What the prefix cache knows about the states of recurrent layers of a request (prefix_states.py)."""

from __future__ import annotations

from ..mem_cache.base_prefix_cache import CacheNode


class ReqStates:
    """The saved states of a request with a row. Only PrefixStates changes it."""

    __slots__ = ("branch_len", "is_temporary", "row", "saved_len", "temporary_node")

    def __init__(self, branch_len: int) -> None:
        self.branch_len = branch_len
        """Where other requests branch off; 0: nowhere after its cached prefix."""
        self.saved_len = 0
        """Tokens of its newest saved state that the cache does not have yet; 0: there is none."""
        self.row: int | None = None
        """The row that it has taken for this state."""
        self.is_temporary = False
        """Whether this state is that at the end of a chunk. Its next one takes its place."""
        self.temporary_node: CacheNode | None = None
        """The node that has such a state of this request."""
