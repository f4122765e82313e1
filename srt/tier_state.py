"""The state of the tiers below the KV pool, as the scheduler reports it. Counts are since the start of the engine."""

from __future__ import annotations

import msgspec


class FileTierState(msgspec.Struct, frozen=True, kw_only=True):
    """The files of KV blocks. Their sizes include the files of other servers, as of the last look at the folder."""

    used_bytes: int
    max_bytes: int
    read_tokens: int
    """From files to host memory."""
    written_tokens: int
    """From host memory to files."""
    read_bytes: int
    written_bytes: int
    num_damaged: int
    """Files that were removed because they were truncated, damaged or of another format."""
    num_removed: int
    """Files that were removed to stay within `max_bytes`."""
    is_writing: bool
    """False for a minute after a write has failed."""


class TierState(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory, and the files below it if there are any. Tokens are counted in whole pages or blocks."""

    host_used_tokens: int
    """Blocks that are kept or in use."""
    host_total_tokens: int
    saved_tokens: int
    """From the KV pool to host memory."""
    loaded_tokens: int
    """From host memory to the KV pool."""
    saved_bytes: int
    loaded_bytes: int
    dropped_tokens: int
    """Removed from host memory to make room. Files may still have them."""
    files: FileTierState | None = None
