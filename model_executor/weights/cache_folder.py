"""The folder of --weight-cache: its limit of bytes, and entries that one process writes and all processes use.

Several servers may use a folder at once, and users may remove it at any time. An entry is written under another name,
and renamed when it is complete. The process that writes it holds a lock on the unfinished file. The system ends the
lock with the process, so an unfinished file without a lock is abandoned.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from ...srt import env

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 32 << 30
"""Most bytes of all entries and unfinished files together. The least recently used entries are removed first."""
PREFIX = "tercet-"
SUFFIXES = (".safetensors", ".packed")
"""The kinds of entries: dequantised weights (weight_cache.py) and packed weights (packed_cache.py)."""
_UNFINISHED = ".tmp"
_BYTES_PER_S = 20 << 20
"""Two slow cores read a checkpoint and write its entry at this rate if many other processes use them. Alone, they are
more than ten times as fast (docs/performance.md)."""
_STALL_S = 5.0
"""A process that has written nothing for so long is stuck."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A file of the folder, which need not exist."""

    path: Path
    content: str
    """What it has, for the log."""
    num_bytes: int
    """About its size."""
    source_bytes: int
    """What must be read to write it."""
    open: Callable[[], T | None]
    """Returns None if there is no file, or if it is damaged. Raises OSError."""
    write: Callable[[BinaryIO], None]
    """Raises OSError."""


class CacheFolder:
    """A folder of entries, which need not exist."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def open_or_write(self, entry: Entry[T]) -> T | None:
        """Open an entry, and write it first if necessary. Returns None if that is not possible, with a line in the log.

        If another process is writing it, waits for that, unless that process is stuck or very slow.
        """
        before = _version(entry.path)
        try:
            found = entry.open()
        except OSError as error:  # the entry may be right, and of use for others
            logger.warning("Could not open %s: %s", entry.path, error.strerror or error)
            return None
        if found is not None:
            _mark_used(entry.path)
            return found
        try:
            return self._write(entry, before)
        except OSError as error:
            logger.warning("Could not cache the %s in %s: %s", entry.content, self.path, error.strerror or error)
            return None

    def _write(self, entry: Entry[T], before: object) -> T | None:
        """Write an entry whose version is `before`, and open it. Raises OSError."""
        with self._new_file(entry, before) as file:
            found = None if _version(entry.path) == before else entry.open()  # another process has written it
            if found is not None or file is None:
                return found
            self.make_room(entry.num_bytes)
            entry.write(file)
        logger.info("Cached the %s in %s", entry.content, entry.path)
        return entry.open()

    def make_room(self, num_bytes: int) -> None:
        """Remove abandoned files, and as many of the least recently used entries as necessary.

        Raises OSError if that does not make room. If not even the removal of all entries would, removes none.
        """
        used = 0
        for path in self.path.glob(f"{PREFIX}*{_UNFINISHED}"):
            _remove_abandoned(path)
            used += _size(path)
        entries = [path for path in self.path.glob(f"{PREFIX}*") if path.suffix in SUFFIXES]
        entries.sort(key=_age_s, reverse=True)
        sizes = [_size(path) for path in entries]
        used += sum(sizes)
        free = shutil.disk_usage(self.path).free
        # The room after the removal of no entry, of the first one, of the first two, and so on.
        rooms = [
            min(self._max_bytes - used + removed, (free + removed) // 2)
            for removed in itertools.accumulate(sizes, initial=0)
        ]
        num_removed = bisect_left(rooms, num_bytes)
        if num_removed == len(rooms):
            raise _no_room(num_bytes, rooms[-1])
        for path in entries[:num_removed]:
            path.unlink(missing_ok=True)
        if num_removed:  # what another process maps takes space until that ends
            room = shutil.disk_usage(self.path).free // 2
            if num_bytes > room:
                raise _no_room(num_bytes, room)

    @contextlib.contextmanager
    def _new_file(self, entry: Entry[T], before: object) -> Iterator[BinaryIO | None]:
        """A file that only this process writes. If something was written, it becomes the entry's file.

        None: another process has written the entry, whose version was `before`, or is still writing it after a wait.
        Raises OSError.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = entry.path.with_name(entry.path.name + _UNFINISHED)
        descriptor = self._lock(unfinished, entry, before)
        if descriptor is None:
            yield None
            return
        with open(descriptor, "wb") as file:
            try:
                os.ftruncate(descriptor, 0)  # a process has died while it wrote
                yield file
                file.flush()
                if os.fstat(descriptor).st_size:
                    os.replace(unfinished, entry.path)
                else:
                    os.unlink(unfinished)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise

    def _lock(self, unfinished: Path, entry: Entry[T], before: object) -> int | None:
        """As `_lock`. Waits for a process that has the lock, until the entry has another version than `before`."""
        now_s = time.monotonic()
        end_s, stall_s, size = now_s + (entry.source_bytes + entry.num_bytes) / _BYTES_PER_S, now_s + _STALL_S, 0
        while (descriptor := _lock(unfinished, os.O_CREAT)) is None:
            if _version(entry.path) != before:
                return None
            size_before, size, now_s = size, _size(unfinished), time.monotonic()
            if size != size_before:
                stall_s = now_s + _STALL_S
            if now_s >= min(end_s, stall_s):
                logger.warning("Waiting no longer for another process to write %s", unfinished)
                return None
            time.sleep(_POLL_S)
        return descriptor


def open_cache_folder(setting: str) -> CacheFolder | None:
    """Open the folder of the setting --weight-cache: auto, off or a folder. Returns None if there is no cache."""
    if setting == "off":
        return None
    path = env.cache_folder() if setting == "auto" else Path(setting)
    return None if path is None else CacheFolder(path)


def _lock(path: Path, flags: int = 0) -> int | None:
    """Open a file for writing, and lock it until it is closed. Returns None if it is locked. Raises OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it has been renamed or removed since it was opened


def _remove_abandoned(path: Path) -> None:
    """Remove an unfinished file if no process is writing it."""
    with contextlib.suppress(OSError):  # it has gone, or it belongs to another user
        descriptor = _lock(path)
        if descriptor is not None:
            try:
                path.unlink()
            finally:
                os.close(descriptor)


def _no_room(num_bytes: int, room: int) -> OSError:
    reason = f"they take {num_bytes >> 20} MiB, but only {max(room, 0) >> 20} MiB are available"
    return OSError(errno.ENOSPC, reason)


def _mark_used(path: Path) -> None:
    """Make an entry the most recently used one."""
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(path)


def _version(path: Path) -> object:
    """Equal results mean the same content. None: there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _age_s(path: Path) -> float:
    """Seconds since the file was written or used. Infinite if the file no longer exists."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
