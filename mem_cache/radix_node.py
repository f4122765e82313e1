"""A node of the radix cache's tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..srt.arrays import Int32Array
from .base_prefix_cache import CacheNode

if TYPE_CHECKING:  # it imports this file
    from .retention import Retention

EMPTY: Int32Array = np.empty(0, dtype=np.int32)
EMPTY.flags.writeable = False
NO_TICKET = 0


class RadixNode(CacheNode):
    """An edge and the node at its end. `tokens`, `slots`: int32 [n]; `key`: the node's key in `parent.children`."""

    __slots__ = (
        "children",
        "created",
        "end",
        "key",
        "last_access",
        "lead",
        "lock_count",
        "num_retained",
        "num_uses",
        "parent",
        "retained_until_s",
        "retentions",
        "slots",
        "ticket",
        "tokens",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        key: bytes,
        tokens: Int32Array,
        slots: Int32Array,
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
        self.end: int = len(tokens) + (0 if parent is None else parent.end)
        """The length of the prefix that ends here, in tokens."""
        # With retentions (mem_cache/retention.py); otherwise nobody changes them.
        self.lead = 0  # nobody reads it before the second use, which follows an access
        """The age, in ticks, at which prefixes were evicted when this node was last accessed."""
        self.retentions: dict[Retention, None] | None = None
        """Those of requests that ended here. The values mean nothing."""
        self.num_retained = 0
        """Retentions here and below."""
        self.retained_until_s = 0.0
        # The ticket of this node's valid heap entry; NO_TICKET unless the node is a leaf without locks.
        self.ticket = NO_TICKET

    def shorten(self, kept_len: int) -> None:
        """Drop all tokens but the first `kept_len`."""
        self.end -= len(self.tokens) - kept_len
        self.tokens = shortened(self.tokens, kept_len)
        self.slots = shortened(self.slots, kept_len)


def freed_by_unlock(nodes: Iterable[RadixNode]) -> Iterator[int]:
    """See BasePrefixCache."""
    num_unlocks: Counter[RadixNode] = Counter()
    for end in nodes:
        num_freed = 0
        node, parent = end, end.parent
        while parent is not None:  # the root has no locks
            num_unlocks[node] += 1
            if num_unlocks[node] == node.lock_count:
                num_freed += len(node.tokens)
            node, parent = parent, parent.parent
        yield num_freed


def shortened(array: Int32Array, length: int) -> Int32Array:
    """The first `length` elements. A copy, if a view would keep an array of more than twice that length in memory."""
    base = array if array.base is None else array.base
    assert isinstance(base, np.ndarray)
    return array[:length].copy() if 2 * length < len(base) else array[:length]


def common_len(a: Int32Array, b: Int32Array) -> int:
    """The length of the longest common prefix of two arrays."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter
