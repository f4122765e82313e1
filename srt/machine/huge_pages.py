"""Zeroed memory on huge pages, if the system has them.

Huge pages save waits for page tables: in a virtual machine one thread reads 29 instead of 20 GB/s (docs/log.md). The
system provides the memory on first access, 2 MiB at a time.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 64


def zeroed(num_bytes: int) -> Bytes:
    """Allocate zeroed memory, aligned to a huge page. It is returned to the system with the last view of the array.

    Raises OSError if the system refuses it.
    """
    try:
        mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OverflowError:  # no address space is so large
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return memory[start : start + num_bytes]


class Arena:
    """An allocator of small pieces of zeroed memory on shared huge pages.

    A chunk is returned to the system when all its pieces have been released.
    """

    def __init__(self) -> None:
        self._chunk: Bytes = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> Bytes:
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._chunk):
            self._chunk = zeroed(max(size, _CHUNK))
        taken, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return taken
