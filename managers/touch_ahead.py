"""Gets memory for the KV pool before requests need it.

The KV pool of a CPU is mapped, but the system provides its memory on first access. In a virtual machine this may take
5 ms for 2 MiB, because its host provides the memory, too. A step of a prompt that writes 15 MiB then takes a fifth more
time. So an idle engine touches the slots that the allocator will give out next: more of them on such a machine. There,
the system provides some memory quickly, because it was in use before. So one slow slice is enough to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..mem_cache.allocator import BaseAllocator

BYTES_AHEAD = 256 << 20
"""Memory that the pool takes before it is needed."""
SLOW_BYTES_AHEAD = 1 << 30
"""The same once a slice was slow."""
_SLICE_BYTES = 2 << 20
_SLOW_SLICE_S = 1e-3
"""A slice takes about 0.1 ms if the system need not ask a host for its memory."""


class HostKVPool(Protocol):
    """What is asked of a KV pool in the memory of the host; see TokenToKVPool."""

    @property
    def bytes_per_slot(self) -> int: ...

    def touch(self, start: int, end: int) -> None:
        """Make the system provide the memory of the free slots [start, end)."""


class TouchAhead:
    """Touches the next slots that were never allocated, one slice for each call of `touch_slice`."""

    def __init__(self, allocator: BaseAllocator, pool: HostKVPool, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._allocator = allocator
        self._pool = pool
        self._clock = clock
        self._bytes_ahead = BYTES_AHEAD
        self._num_in_slice = max(_SLICE_BYTES // pool.bytes_per_slot, 1)
        self._end = 0
        """Where the last slice ended."""

    @property
    def is_due(self) -> bool:
        """Whether there are slots to touch."""
        return self._start < self._target

    def touch_slice(self) -> None:
        """Touch one slice: a few milliseconds of work."""
        start, began_s = self._start, self._clock()
        self._end = min(start + self._num_in_slice, self._target)
        self._pool.touch(start, self._end)
        if self._clock() - began_s > _SLOW_SLICE_S:
            self._bytes_ahead = SLOW_BYTES_AHEAD

    @property
    def _start(self) -> int:
        return max(self._end, self._allocator.first_unused_slot)

    @property
    def _target(self) -> int:
        allocator, num_ahead = self._allocator, self._bytes_ahead // self._pool.bytes_per_slot
        return min(allocator.first_unused_slot + num_ahead, allocator.size + allocator.page_size)
