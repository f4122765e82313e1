"""The C library's heap."""

from __future__ import annotations

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim_heap() -> None:
    """Gives memory that was freed back to the system: glibc keeps it, most of all what lay between things that stay.
    Does nothing with another C library."""
    if _trim is not None:
        _trim(0)
