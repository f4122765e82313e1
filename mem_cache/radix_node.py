"""A node of the radix cache's tree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .base_prefix_cache import CacheNode

EMPTY: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
EMPTY.flags.writeable = False
NO_TICKET = 0


class RadixNode(CacheNode):
    """An edge and the node at its end. `tokens`, `slots`: int32 [n]; `key`: the node's key in `parent.children`."""

    __slots__ = (
        "children",
        "created",
        "key",
        "last_access",
        "lock_count",
        "num_uses",
        "parent",
        "slots",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        key: bytes,
        tokens: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        tick: int,
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.slots = slots
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.created = tick
        self.last_access = tick
        self.num_uses = 0
        # The ticket of this node's valid heap entry; NO_TICKET unless the node is a leaf without locks.
        self.ticket = NO_TICKET
