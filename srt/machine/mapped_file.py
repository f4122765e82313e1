"""Files mapped into memory, read-only: all processes that map a file share its pages in the page cache.

Such pages are huge only if the file system keeps a file in large folios (ext4 on Linux 6.18 does), and if the file
was written, or read first, in pieces of that size. `bytes_on_huge_pages` tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .cgroups import read_text
from .huge_pages import Bytes

_SMAPS = Path("/proc/self/smaps")
_libc = ctypes.CDLL(None)
_mlock = getattr(_libc, "mlock", None)


def map_file(file: BinaryIO, num_bytes: int) -> Bytes:
    """Map the first `num_bytes` > 0 of a file. The array cannot be written. It is unmapped with its last view.

    If somebody makes the file shorter, the process is killed when it reads a lost page. Raises ValueError if the file
    is shorter already, and OSError.
    """
    mapped = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)  # what is read from the disk is read in folios of this size
    return np.frombuffer(mapped, np.uint8)


def bytes_on_huge_pages(mapped: Bytes, smaps: Path = _SMAPS) -> int:
    """The bytes of a `map_file` that this process reads through huge pages. Pages count once they have been read."""
    lines = iter(read_text(smaps).splitlines())  # none if this is not Linux
    start = f"{mapped.ctypes.data:x}-"
    for line in lines:
        if line.startswith(start):
            break
    for line in lines:
        name, _, value = line.partition(":")
        if name == "FilePmdMapped":
            return int(value.split()[0]) * 1024
        if name == "VmFlags":  # the last line of a mapping
            break
    return 0


def lock(mapped: Bytes) -> None:
    """Keep the pages of a `map_file` in memory if the limit of locked memory allows it. Then they count as used."""
    if _mlock is not None:
        _mlock(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes))
