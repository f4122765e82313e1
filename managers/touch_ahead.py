"""Gets memory for the KV pool before requests need it.

The KV pool of a CPU is mapped, but the system provides its memory on first access. In a virtual machine this takes
about 5 ms for 2 MiB, which is longer than most steps that write so much. So an idle engine touches the slots that the
allocator will give out next.
"""

from __future__ import annotations

from typing import Protocol

from ..mem_cache.allocator import BaseAllocator

BYTES_AHEAD = 256 << 20
"""Memory that the pool takes at most before it is needed."""
_SLICE_BYTES = 2 << 20


class HostKVPool(Protocol):
    """What is asked of a KV pool in the memory of the host; see MHATokenToKVPool."""

    @property
    def bytes_per_slot(self) -> int: ...

    def touch(self, start: int, end: int) -> None:
        """Make the system provide the memory of the free slots [start, end)."""


class TouchAhead:
    """Touches the next slots that were never allocated, one slice for each call of `touch_slice`."""

    def __init__(self, allocator: BaseAllocator, pool: HostKVPool) -> None:
        self._allocator = allocator
        self._pool = pool
        self._num_ahead = BYTES_AHEAD // pool.bytes_per_slot
        self._num_in_slice = max(_SLICE_BYTES // pool.bytes_per_slot, 1)
        self._end = 0
        """Where the last slice ended."""

    @property
    def is_due(self) -> bool:
        """Whether there are slots to touch."""
        return self._start < self._target

    def touch_slice(self) -> None:
        """Touch one slice: a few milliseconds of work."""
        start = self._start
        self._end = min(start + self._num_in_slice, self._target)
        self._pool.touch(start, self._end)

    @property
    def _start(self) -> int:
        return max(self._end, self._allocator.first_unused_slot)

    @property
    def _target(self) -> int:
        allocator = self._allocator
        return min(allocator.first_unused_slot + self._num_ahead, allocator.size + allocator.page_size)
