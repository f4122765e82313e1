"""The C library's heap. With another library than glibc nothing here does anything."""

from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_trim = getattr(_libc, "malloc_trim", None)
_set_option = getattr(_libc, "mallopt", None)

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_MMAP_THRESHOLD = 32 << 20
_KEPT = 512 << 20


def trim_heap() -> None:
    """Gives memory that was freed back to the system: glibc keeps it, most of all what lay between things that stay."""
    if _trim is not None:
        _trim(0)


def keep_freed_memory() -> None:
    """From now on what large tensors took stays with the process when they go. Getting it from the system for every
    step anew means a page fault for every 4 KiB, and zeros that nobody reads: 3 to 5 % of a prefill."""
    if _set_option is not None:
        _set_option(_M_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        _set_option(_M_TRIM_THRESHOLD, _KEPT)
