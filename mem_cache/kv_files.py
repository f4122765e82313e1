"""KV blocks in files: a folder with one file for each block. Servers may share it, and it survives them.

A file is named after the key of its block. It has a header (format, checksum, sizes, key), what the key stands for
(BlockContent), and the bytes of the block. It appears complete, because it is written under another name and then
renamed. A file is used only if its header and its checksum are right. Any other file is removed, with a line in the
log.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .block_keys import KEY_BYTES, BlockContent

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_PREFIX = "tercet-kv-"
_SUFFIX = ".kv"
_UNFINISHED = ".tmp"
_ABANDONED_S = 3600.0
"""An unfinished file of this age is abandoned: its writer has died."""
_MAGIC = b"TERCETKV"
_VERSION = 2
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}sI")
"""Magic, version, CRC-32 of key, content and data, bytes of data, key, bytes of the content."""
_CONTENT = struct.Struct(f"<{KEY_BYTES}sI")
"""The key before, bytes of the namespace. The namespace and the tokens follow."""
_MAX_CONTENT_BYTES = 1 << 20
"""A file that claims more is damaged."""
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
        self._changes: list[tuple[bytes, bool]] | None = None
        """What `take_changes` will return. None: nobody asks."""
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
            self._forget(path.name)
            return False
        except OSError as error:
            problem = error.strerror or str(error)
        if problem is None:
            with contextlib.suppress(OSError):  # the folder may have become read-only
                os.utime(path)
            return True
        logger.warning("Removing %s, whose KV is computed anew: %s", path, problem)
        self.num_damaged += 1
        self._forget(path.name)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def write(self, key: bytes, content: BlockContent, data: Bytes) -> bool:
        """Write the block of this key, unless there is a file. Returns whether it was written.

        The first failure switches writing off, with a line.
        """
        if not self.is_writing or self.has(key):
            return False
        packed = _pack(content)
        size = _HEADER.size + len(packed) + data.nbytes
        if size > self.max_bytes:
            return False
        try:
            if self.used_bytes + size > self.max_bytes:
                self._trim(size)
            self._write(_name(key), _header(key, packed, data) + packed, data)
        except OSError as error:
            self.is_writing = False
            logger.warning("Writing no more KV to %s: %s", self._folder, error.strerror or error)
            return False
        self.used_bytes += size
        self._known.add(_name(key))
        self._note(_name(key), is_there=True)
        return True

    def look(self) -> None:
        """Learn which files other servers have written or removed, if any."""
        with contextlib.suppress(OSError):
            if os.stat(self._folder).st_mtime_ns != self._scanned:
                self._scan()

    # What the folder has, for KV events

    def list_files(self) -> None:
        """From now on, `take_changes` tells all: first the files that there are, in the order of their last use."""
        self._changes = None
        found: list[tuple[int, int, str]] = []
        with contextlib.suppress(OSError):
            found = self._scan()
        self._changes = []
        for *_, name in sorted(found):
            self._note(name, is_there=True)

    def take_changes(self) -> Sequence[tuple[bytes, bool]]:
        """Keys of files that have come (True) or gone (False) since the last call, in order."""
        changes = self._changes
        if not changes:
            return ()
        self._changes = []
        return changes

    def content(self, key: bytes) -> BlockContent | None:
        """What a file says about its key. Returns None if there is no file, or one that is damaged."""
        try:
            with open(self._folder / _name(key), "rb", buffering=0) as file:
                magic, version, *_, length = _unpack_header(file.read(_HEADER.size))
                packed = file.read(length)
        except FileNotFoundError:
            self._forget(_name(key))
            return None
        except (OSError, ValueError):
            return None
        content = _unpack(packed) if (magic, version) == (_MAGIC, _VERSION) else None
        return content if content is not None and content.key == key else None

    def _note(self, name: str, *, is_there: bool) -> None:
        if self._changes is not None:
            with contextlib.suppress(ValueError):  # a name of somebody else
                self._changes.append((bytes.fromhex(name.removeprefix(_PREFIX).removesuffix(_SUFFIX)), is_there))

    def _forget(self, name: str) -> None:
        self._known.discard(name)
        self._note(name, is_there=False)

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
        before, self._known = self._known, {name for *_, name in found}
        if self._changes is not None:
            for name in before - self._known:
                self._note(name, is_there=False)
            for *_, name in sorted(one for one in found if one[-1] not in before):
                self._note(name, is_there=True)
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
            self._forget(name)
            self.used_bytes -= size
            self.num_removed += 1

    def _remove_abandoned(self) -> None:
        for path in self._folder.glob(f"{_PREFIX}*{_UNFINISHED}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def _name(key: bytes) -> str:
    return f"{_PREFIX}{key.hex()}{_SUFFIX}"


def _header(key: bytes, packed: bytes, data: Bytes) -> bytes:
    checksum = zlib.crc32(data.data, zlib.crc32(packed, zlib.crc32(key)))
    return _HEADER.pack(_MAGIC, _VERSION, checksum, data.nbytes, key, len(packed))


def _unpack_header(header: bytes) -> tuple[Any, ...]:
    """The fields of a header. Raises ValueError if they cannot be right."""
    if len(header) < _HEADER.size:
        raise ValueError("the file has no whole header")
    fields = _HEADER.unpack(header)
    if fields[-1] > _MAX_CONTENT_BYTES:
        raise ValueError("the content is too long")
    return fields


def _pack(content: BlockContent) -> bytes:
    namespace = content.namespace.encode("utf-8", "surrogatepass")
    return _CONTENT.pack(content.before, len(namespace)) + namespace + content.tokens


def _unpack(packed: bytes) -> BlockContent | None:
    """Returns None if these are no bytes of `_pack`."""
    if len(packed) < _CONTENT.size:
        return None
    before, length = _CONTENT.unpack_from(packed)
    end = _CONTENT.size + length
    try:
        return BlockContent(before, packed[_CONTENT.size : end].decode("utf-8", "surrogatepass"), packed[end:])
    except UnicodeDecodeError:
        return None


def _read(path: Path, key: bytes, target: Bytes) -> str | None:
    """Fill `target` from a file. Returns what is wrong with the file, if anything. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        header = file.read(_HEADER.size)
        try:
            packed = file.read(_unpack_header(header)[-1])
        except ValueError:
            return "its header is damaged"
        view = target.data
        while view:
            count = file.readinto(view)
            if not count:
                return "it is too short"
            view = view[count:]
        if file.read(1):
            return "it is too long"
    if header != _header(key, packed, target):
        return "its content is damaged"
    return None
