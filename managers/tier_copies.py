"""The copies between the KV pool and host memory in one step (kv_tiers.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..mem_cache.kv_storage import WriteJob
from ..model_executor.step import Int32Array, KVCopies


@dataclass(eq=False, slots=True)
class TierCopies:
    """Numbers of pages in the pool and in host memory, and the blocks that the copies pin."""

    out_pages: list[Int32Array] = field(default_factory=list)
    out_host: list[Int32Array] = field(default_factory=list)
    in_host: list[Int32Array] = field(default_factory=list)
    in_pages: list[Int32Array] = field(default_factory=list)
    filled: list[WriteJob] = field(default_factory=list)
    """The blocks of the copies out, pinned until these are made and written."""
    loaded: list[int] = field(default_factory=list)
    """The blocks of the copies in, pinned until these are made."""

    @property
    def blocks(self) -> list[int]:
        """A block for each pin."""
        return [*self.loaded, *(job.block for job in self.filled)]

    def copy_out(self, slots: Int32Array, filled: dict[int, int], page_size: int, pages_per_block: int) -> None:
        """Adds copies of a request's KV into host memory. `slots`: of its positions. `filled`: the block of host memory
        for each block of the prefix."""
        blocks = np.array([*filled.items()], np.int32)
        pages = np.add.outer(blocks.T * pages_per_block, np.arange(pages_per_block, dtype=np.int32)).reshape(2, -1)
        self.out_pages.append(slots[pages[0] * page_size] // page_size)
        self.out_host.append(pages[1])

    def arrays(self) -> KVCopies:
        return KVCopies(*map(_concatenated, (self.out_pages, self.out_host, self.in_host, self.in_pages)))


def _concatenated(parts: list[Int32Array]) -> Int32Array:
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)
