"""Counts of the copies between the tiers of the KV cache since the start (kv_tiers.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..mem_cache.host_blocks import HostBlocks
from ..mem_cache.kv_files import KVFiles
from ..srt.tier_state import FileTierState, TierState


@dataclass(eq=False, slots=True)
class TierCounts:
    page_size: int
    block_len: int
    """Tokens of a block."""
    block_bytes: int
    num_saved: int = 0
    """Blocks that were copied out of the pool."""
    num_loaded: int = 0
    """Pages that were copied into it."""
    num_read: int = 0
    """Blocks that were read from files."""
    num_written: int = 0
    """Blocks that were written to files."""

    def state(self, blocks: HostBlocks, files: KVFiles | None) -> TierState:
        return TierState(
            host_used_tokens=(blocks.num_blocks - blocks.num_free) * self.block_len,
            host_total_tokens=blocks.num_blocks * self.block_len,
            saved_tokens=self.num_saved * self.block_len,
            loaded_tokens=self.num_loaded * self.page_size,
            saved_bytes=self.num_saved * self.block_bytes,
            loaded_bytes=self.num_loaded * self.block_bytes * self.page_size // self.block_len,
            dropped_tokens=blocks.num_dropped * self.block_len,
            files=None if files is None else self._file_state(files),
        )

    def _file_state(self, files: KVFiles) -> FileTierState:
        return FileTierState(
            used_bytes=files.used_bytes,
            max_bytes=files.max_bytes,
            read_tokens=self.num_read * self.block_len,
            written_tokens=self.num_written * self.block_len,
            read_bytes=self.num_read * self.block_bytes,
            written_bytes=self.num_written * self.block_bytes,
            num_damaged=files.num_damaged,
            num_removed=files.num_removed,
            is_writing=files.is_writing,
        )
