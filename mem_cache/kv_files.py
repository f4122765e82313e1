"""KV blocks in files: a folder with one file for each block. Servers may share it, and it survives them.

A file is named after the key of its block. It has a header (format, checksum, size, key) and then the bytes of the
block. It appears complete, because it is written under another name and then renamed. A file is used only if its header
and its checksum are right. Any other file is removed, with a line in the log.

The total size is bounded: before a file is written, the least recently used files are removed. Reading a file sets its
modification time, so the bound holds for all servers of a folder together.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .block_keys import KEY_BYTES

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_PREFIX = "tercet-kv-"
_SUFFIX = ".kv"
_UNFINISHED = ".tmp"
_ABANDONED_S = 3600.0
"""An unfinished file of this age is abandoned: its writer has died."""
_MAGIC = b"TERCETKV"
_VERSION = 1
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}s")
"""Magic, version, CRC-32 of key and data, bytes of data, key."""
_FILL_AFTER_TRIM = 0.9
_TIME_GRAIN_NS = 2_000_000_000
"""Two changes of a folder within this time may have the same modification time."""


class KVFiles:
    """The files of one folder. One thread reads and writes; any thread may ask `has`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder. Raises ValueError if that fails, or if the folder cannot be written to."""
        self.max_bytes = max_bytes
        self.num_damaged = self.num_removed = 0
        """Files that this server has removed: damaged ones, and ones that were one too many."""
        self._folder = folder
        self.is_writing = True
        """False after a write has failed, as on a full disk. Nothing is written from then on."""
        self.used_bytes = 0
        """Of all files, as of the last scan, and of what was written since."""
        self._known: set[str] = set()
        self._scanned: int | None = None
        """Modification time of the folder before the last scan, in ns. None: it may change without a new time."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"--hicache-storage-dir {folder}: {error.strerror or error}") from error
        self._remove_abandoned()
        self._trim(0)

    def has(self, key: bytes) -> bool:
        """Whether there was a file at the last look. It may be gone or damaged. Reads nothing from the disk."""
        return _name(key) in self._known

    def read(self, key: bytes, target: Bytes) -> bool:
        """Fill `target`: uint8 [n] with the block of this key. Returns False, with any content, if that fails."""
        path = self._folder / _name(key)
        try:
            problem = _read(path, key, target)
        except FileNotFoundError:
            self._known.discard(path.name)
            return False
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is None:
            with contextlib.suppress(OSError):  # the folder may have become read-only
                os.utime(path)
            return True
        logger.warning("Removing %s, whose KV is computed anew: %s", path, problem)
        self.num_damaged += 1
        self._known.discard(path.name)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def write(self, key: bytes, data: Bytes) -> bool:
        """Write the block of this key, unless there is a file. Returns whether it was written.

        The first failure switches writing off, with a line.
        """
        if not self.is_writing or self.has(key):
            return False
        size = _HEADER.size + data.nbytes
        if size > self.max_bytes:
            return False
        try:
            if self.used_bytes + size > self.max_bytes:
                self._trim(size)
            self._write(_name(key), _HEADER.pack(_MAGIC, _VERSION, _checksum(key, data), data.nbytes, key), data)
        except OSError as error:
            self.is_writing = False
            logger.warning("Writing no more KV to %s: %s", self._folder, error.strerror or error)
            return False
        self.used_bytes += size
        self._known.add(_name(key))
        return True

    def look(self) -> None:
        """Learn which files other servers have written or removed, if any."""
        with contextlib.suppress(OSError):
            if os.stat(self._folder).st_mtime_ns != self._scanned:
                self._scan()

    def _write(self, name: str, header: bytes, data: Bytes) -> None:
        descriptor, unfinished = tempfile.mkstemp(_UNFINISHED, _PREFIX, self._folder)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                for part in (memoryview(header), data.data):
                    while part:
                        part = part[file.write(part) :]
            os.replace(unfinished, self._folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise

    def _scan(self) -> list[tuple[int, int, str]]:
        """Look at all files. Returns (time of the last use in ns, bytes, name) of each. Raises OSError."""
        scanned = os.stat(self._folder).st_mtime_ns
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(OSError):  # another server has removed it
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime_ns, stat.st_size, entry.name))
        self._known = {name for *_, name in found}
        self.used_bytes = sum(size for _, size, _ in found)
        self._scanned = scanned if time.time_ns() - scanned > _TIME_GRAIN_NS else None
        return found

    def _trim(self, num_bytes: int) -> None:
        """Remove the least recently used files until `num_bytes` fit, and some more. Raises OSError."""
        found = self._scan()
        if self.used_bytes + num_bytes <= self.max_bytes:
            return
        limit = max(int(self.max_bytes * _FILL_AFTER_TRIM) - num_bytes, 0)
        for _, size, name in sorted(found):
            if self.used_bytes <= limit:
                return
            (self._folder / name).unlink(missing_ok=True)
            self._known.discard(name)
            self.used_bytes -= size
            self.num_removed += 1

    def _remove_abandoned(self) -> None:
        for path in self._folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def _name(key: bytes) -> str:
    return f"{_PREFIX}{key.hex()}{_SUFFIX}"


def _checksum(key: bytes, data: Bytes) -> int:
    return zlib.crc32(data.data, zlib.crc32(key))


def _read(path: Path, key: bytes, target: Bytes) -> str | None:
    """Fill `target` from a file. Returns what is wrong with the file, if anything. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        header = file.read(_HEADER.size)
        view = target.data
        while view:
            count = file.readinto(view)
            if not count:
                return "it is too short"
            view = view[count:]
        if file.read(1):
            return "it is too long"
    if header != _HEADER.pack(_MAGIC, _VERSION, _checksum(key, target), target.nbytes, key):
        return "its content is damaged"
    return None
