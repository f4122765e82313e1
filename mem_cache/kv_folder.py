"""What is in a folder of KV files (kv_files.py), and how much more may be written to its disk.

The modification time of a file is the time of its last use, rounded down to a whole minute, and 1 ms earlier for each
block that precedes it in its prefix. A use of a block counts as a use of the blocks before it. So if files are removed
in the order of these times, oldest first, a block is removed before those that it continues.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .block_keys import KEY_BYTES

PREFIX = "tercet-kv-"
UNFINISHED = ".tmp"
MIN_FREE_BYTES = 1 << 30
MIN_FREE_SHARE = 0.05
"""The files leave this share of the disk free, or MIN_FREE_BYTES if that is less."""
_SUFFIX = ".kv"
_ABANDONED_NS = 3600 * 10**9
"""An unfinished file of this age is abandoned: its writer has died."""
_SORTED_AT_ONCE = 4096
"""To sort so many files takes less than 5 ms. No other thread runs meanwhile."""
_USE_GRAIN_NS = 60 * 10**9
BLOCK_STEP_NS = 10**6


class KVFile(NamedTuple):
    used_ns: int
    """The time of its last use."""
    num_bytes: int
    key: bytes


class Listing(NamedTuple):
    """The contents of a folder. Other files are ignored."""

    files: list[KVFile]
    unfinished_bytes: int
    """Of the unfinished files, except for `abandoned`."""
    abandoned: list[str]
    """Names of unfinished files whose writers have died."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files) + self.unfinished_bytes


def file_name(key: bytes) -> str:
    return f"{PREFIX}{key.hex()}{_SUFFIX}"


def list_folder(folder: Path) -> Listing:
    """Raises OSError."""
    files, abandoned, unfinished_bytes = [], [], 0
    now_ns = time.time_ns()
    with os.scandir(folder) as entries:
        for entry in entries:
            key = _key(entry.name)
            if key is None and not (entry.name.startswith(PREFIX) and entry.name.endswith(UNFINISHED)):
                continue
            with contextlib.suppress(OSError):  # another server has removed it
                found = entry.stat(follow_symlinks=False)
                if key is not None:
                    files.append(KVFile(found.st_mtime_ns, found.st_size, key))
                elif now_ns - found.st_mtime_ns > _ABANDONED_NS:
                    abandoned.append(entry.name)
                else:
                    unfinished_bytes += found.st_size
    return Listing(files, unfinished_bytes, abandoned)


def in_order_of_use(files: Sequence[KVFile], *, latest_first: bool = False) -> Iterator[KVFile]:
    """The files, the least recently used first. However many there are, other threads can run after a few ms."""
    pieces = [
        sorted(files[start : start + _SORTED_AT_ONCE], reverse=latest_first)
        for start in range(0, len(files), _SORTED_AT_ONCE)
    ]
    return heapq.merge(*pieces, reverse=latest_first)


def use_time_ns(index: int) -> int:
    """The time of a use now, for block `index` of its prefix."""
    return time.time_ns() // _USE_GRAIN_NS * _USE_GRAIN_NS - index * BLOCK_STEP_NS


def spare_bytes(folder: Path) -> int:
    """How much may still be written to the disk. Negative if less is free than should be left. Raises OSError."""
    disk = os.statvfs(folder)
    if not disk.f_blocks:  # some network file systems do not tell
        return sys.maxsize
    return disk.f_bavail * disk.f_frsize - min(int(disk.f_blocks * disk.f_frsize * MIN_FREE_SHARE), MIN_FREE_BYTES)


def file_mode(folder: Path) -> int:
    """The mode of new files: whoever may write to the folder may use them, and nobody else may read them.

    Raises OSError.
    """
    mode = os.stat(folder).st_mode
    group = stat.S_IRGRP | stat.S_IWGRP if mode & stat.S_IWGRP else 0
    others = stat.S_IROTH | stat.S_IWOTH if mode & stat.S_IWOTH else 0
    return stat.S_IRUSR | stat.S_IWUSR | group | others


def _key(name: str) -> bytes | None:
    """The key of a file, or None if the name is no name of `file_name`."""
    if not (name.startswith(PREFIX) and name.endswith(_SUFFIX)):
        return None
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(name[len(PREFIX) : -len(_SUFFIX)])
        return key if len(key) == KEY_BYTES else None
    return None
