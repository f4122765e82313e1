"""The settings of glibc's heap. With another C library these functions do nothing."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_trim = getattr(_libc, "malloc_trim", None)
_set_option = getattr(_libc, "mallopt", None)

# Constants of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_MAX_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 512 << 20


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps much of it otherwise, mostly between blocks in use."""
    if _trim is not None:
        _trim(0)


def keep_freed_memory(*, of_any_size: bool = False) -> None:
    """Make the process keep the memory of freed tensors of up to 32 MiB, at most 512 MiB in all.

    Without this, each step gets its memory from the system again. The page fault and the zeroing of each 4 KiB take 3
    to 5 % of a prefill. `of_any_size`: keep that of larger tensors, too, for a benchmark whose results a server has in
    memory that it never frees.
    """
    if _set_option is not None:
        _set_option(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        if of_any_size:
            _set_option(_M_MMAP_MAX, 0)
        _set_option(_M_TRIM_THRESHOLD, _KEPT_BYTES)
