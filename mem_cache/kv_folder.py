"""What is in a folder of KV files (kv_files.py), and how much more may be written to its disk.

The modification time of a file is the time of its last use, rounded down to a whole minute, and 1 ms earlier for each
block that precedes it in its prefix. A use of a block counts as a use of the blocks before it. So if files are removed
in the order of these times, oldest first, a block is removed before those that it continues.

A file is written under another name, and renamed when it is complete. Its writer holds a lock on it, which the system
ends with the process. So an unfinished file without a lock is abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from .block_keys import KEY_BYTES

_PREFIX = "tercet-kv-"
_UNFINISHED = ".tmp"
MIN_FREE_BYTES = 1 << 30
MIN_FREE_SHARE = 0.05
"""The files leave this share of the disk free, or MIN_FREE_BYTES if that is less."""
_SUFFIX = ".kv"
_ABANDONED_NS = 3600 * 10**9
"""An unfinished file of this age is abandoned, if nobody can ask for its lock."""
_SORTED_AT_ONCE = 4096
"""To sort so many files takes less than 5 ms. No other thread runs meanwhile."""
_USE_GRAIN_NS = 60 * 10**9
_MAX_AHEAD_NS = 24 * 3600 * 10**9
"""If the time of a file is further ahead of the clock, the clock was wrong when the file was used. By its time, the
file would stay until then, and newer ones would be removed instead."""
BLOCK_STEP_NS = 10**6


class KVFile(NamedTuple):
    used_ns: int
    """The time of its last use."""
    num_bytes: int
    key: bytes


class Listing(NamedTuple):
    """The contents of a folder. Other files are ignored, and so is everything that is no regular file."""

    files: list[KVFile]
    unfinished_bytes: int
    """Of the files that are being written."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files) + self.unfinished_bytes


def file_name(key: bytes) -> str:
    return f"{_PREFIX}{key.hex()}{_SUFFIX}"


def list_folder(folder: Path) -> Listing:
    """Also removes the unfinished files of writers that have died. Raises OSError."""
    files, unfinished_bytes = [], 0
    latest_ns = time.time_ns() + _MAX_AHEAD_NS
    with os.scandir(folder) as entries:
        for entry in entries:
            key = _key(entry.name)
            if key is None and not (entry.name.startswith(_PREFIX) and entry.name.endswith(_UNFINISHED)):
                continue
            with contextlib.suppress(OSError):  # another server has removed it
                found = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    continue
                if key is not None:
                    used_ns = found.st_mtime_ns if found.st_mtime_ns <= latest_ns else 0
                    files.append(KVFile(used_ns, found.st_size, key))
                elif not _remove_abandoned(entry.path, found.st_mtime_ns):
                    unfinished_bytes += found.st_size
    return Listing(files, unfinished_bytes)


def open_file(path: Path) -> FileIO:
    """Open a regular file for reading. Raises OSError, also for anything else: to open a named pipe could take for
    ever."""
    return open(_open_regular(path, os.O_RDONLY), "rb", buffering=0)


def open_unfinished(folder: Path) -> tuple[FileIO, str]:
    """Make a file for writing, locked until it is closed. Returns it and its path. Raises OSError."""
    while True:
        descriptor, path = tempfile.mkstemp(_UNFINISHED, _PREFIX, folder)
        try:
            is_locked = _lock(descriptor, path)
        except OSError:  # the file system has no locks, so no other server asks for this one
            is_locked = True
        if is_locked:
            return open(descriptor, "wb", buffering=0), path
        os.close(descriptor)  # another server has removed it before it was locked


def _remove_abandoned(path: str, modified_ns: int) -> bool:
    """Remove an unfinished file if its writer has died. Returns whether it has. Raises OSError."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = _open_regular(path, os.O_RDWR)
            stack.callback(os.close, descriptor)
            is_abandoned = _lock(descriptor, path)
        except OSError:  # a file of another user, or a file system without locks
            is_abandoned = time.time_ns() - modified_ns > _ABANDONED_NS
        if is_abandoned:
            os.unlink(path)
        return is_abandoned


def _open_regular(path: str | Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Not a regular file")


def _lock(descriptor: int, path: str) -> bool:
    """Lock a file until it is closed. Returns False if it is locked, or no longer there. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


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
    try:
        key = bytes.fromhex(name[len(_PREFIX) : -len(_SUFFIX)])
    except ValueError:
        return None
    # Of the same key, `fromhex` also reads names in capitals or with spaces.
    return key if len(key) == KEY_BYTES and name == file_name(key) else None
