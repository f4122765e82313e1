"""The folder of --weight-cache: its limit of bytes, and files that appear only when they are complete.

Several servers may use a folder at once, and users may remove it at any time.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...srt import env

MAX_BYTES = 32 << 30
"""Most bytes of all entries together. The least recently used entries are removed first."""
PREFIX = "tercet-"
SUFFIXES = (".safetensors", ".packed")
"""The kinds of entries: dequantised weights (weight_cache.py) and packed weights (packed_cache.py)."""
_UNFINISHED = ".tmp"
_ABANDONED_S = 24 * 3600
"""An unfinished file of this age is abandoned: its writer has died."""


class CacheFolder:
    """A folder of entries, which need not exist."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes

    def make_room(self, num_bytes: int) -> None:
        """Remove abandoned files and the least recently used entries. Raises OSError if that does not make room."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.glob(f"{PREFIX}*{_UNFINISHED}"):
            if _age_s(path) > _ABANDONED_S:
                path.unlink(missing_ok=True)
        if num_bytes <= self._max_bytes:
            left = self._max_bytes - num_bytes
            entries = [path for path in self.path.glob(f"{PREFIX}*") if path.suffix in SUFFIXES]
            for path in sorted(entries, key=_age_s):
                left -= _size(path)
                if left < 0:
                    path.unlink(missing_ok=True)
        room = min(self._max_bytes, shutil.disk_usage(self.path).free // 2)
        if num_bytes > room:
            raise OSError(errno.ENOSPC, f"they take {num_bytes >> 20} MiB, but only {room >> 20} MiB are available")

    @contextlib.contextmanager
    def new_file(self, path: Path) -> Iterator[BinaryIO]:
        """A file to write. It appears under `path` when the block ends without an exception. Raises OSError."""
        descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, PREFIX, self.path)
        try:
            with open(descriptor, "wb") as file:
                yield file
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise


def open_cache_folder(setting: str) -> CacheFolder | None:
    """Open the folder of the setting --weight-cache: auto, off or a folder. Returns None if there is no cache."""
    if setting == "off":
        return None
    path = env.cache_folder() if setting == "auto" else Path(setting)
    return None if path is None else CacheFolder(path)


def mark_used(path: Path) -> None:
    """Make an entry the most recently used one."""
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(path)


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
