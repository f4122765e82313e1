"""KV blocks in files: a folder with one file for each block. Servers may share it, and it survives them.

A file is named after the key of its block. It has a header (format, checksum, sizes, key), what the key stands for
(BlockContent), and the bytes of the block. It appears complete, because it is written under another name and then
renamed. A file is used only if its header and its checksum are right. Any other file is removed, with a line in the
log.

The total size is bounded, and some space of the disk stays free: before a file is written, the least recently used
files are removed. What counts are all files of the folder, of whichever server: as of the last look, and what this
server has written since. So several servers exceed the bound by no more than what they write between two looks.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .block_keys import KEY_BYTES, BlockContent
from .forgotten_keys import ForgottenKeys
from .kv_folder import (
    BLOCK_STEP_NS,
    KVFile,
    Listing,
    file_mode,
    file_name,
    in_order_of_use,
    list_folder,
    open_file,
    open_unfinished,
    spare_bytes,
    use_time_ns,
)

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_MAGIC = b"TERCETKV"
_VERSION = 2
_HEADER = struct.Struct(f"<8sIIQ{KEY_BYTES}sI")
"""Magic, version, CRC-32 of key, content and data, bytes of data, key, bytes of the content."""
_CONTENT = struct.Struct(f"<{KEY_BYTES}sI")
"""The key before, bytes of the namespace. The namespace and the tokens follow."""
MAX_OVERHEAD_BYTES = 1 << 13
"""Of a file of this engine, beside the data: a salt of 256 characters, and a token id for each token of a block."""
_MAX_CONTENT_BYTES = 1 << 20
"""A file that claims more is damaged."""
_FILL_AFTER_TRIM = 0.9
_RETRY_S = 60.0
"""How long nothing is written after a write has failed."""
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a write for which there is no space."""
_TIME_GRAIN_NS = 2_000_000_000
"""Two changes of a folder within this time may have the same modification time."""


class KVFiles:
    """The files of one folder. One thread reads and writes; any thread may ask `has`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder. Raises ValueError if that fails, or if the folder cannot be written to."""
        self.max_bytes = max_bytes
        self.num_damaged = self.num_removed = 0
        """How many files this server has removed because they were damaged, and how many to make room."""
        self.used_bytes = 0
        """Of all files, as of the last scan, and of what was written since."""
        self.forgotten = ForgottenKeys()
        """It has each key for which `has` returned True before and now returns False."""
        self._folder = folder
        self._known: dict[bytes, int] = {}
        """The time of the last use of each file (kv_folder), in ns."""
        self._retry_s = -math.inf
        """Nothing is written until this time of `time.monotonic`."""
        self._has_failed = False
        """Whether the last write has failed."""
        self._read_errors: set[int | None] = set()
        """Of errors that the log has already: their `errno`."""
        self._scanned: int | None = None
        """Modification time of the folder before the last scan, in ns. None: it may change without a new time."""
        self._changes: list[tuple[bytes, bool]] | None = None
        """What `take_changes` will return. None: nobody asks."""
        try:
            self._make_folder()
            with tempfile.TemporaryFile(dir=folder):
                pass
            listing = self._scan()
            if self.used_bytes > max_bytes:
                self._trim(iter(in_order_of_use(listing.files)), int(max_bytes * _FILL_AFTER_TRIM))
        except OSError as error:
            raise ValueError(f"--hicache-storage-dir {folder}: {error.strerror or error}") from error

    @property
    def is_writing(self) -> bool:
        """False for some time after a write has failed, as on a full disk."""
        return time.monotonic() >= self._retry_s

    @property
    def index(self) -> Container[bytes]:
        """The keys that `has` knows now."""
        return self._known

    def has(self, key: bytes) -> bool:
        """Whether there was a file at the last look. It may be gone or damaged. Reads nothing from the disk."""
        return key in self._known

    def read(self, key: bytes, target: Bytes) -> bool:
        """Fill `target`: uint8 [n] with the block of this key. Returns False, with any content, if that fails."""
        path = self._folder / file_name(key)
        try:
            problem = _read(path, key, target)
        except OSError as error:  # the file may be good
            self._forget(key)
            if not isinstance(error, FileNotFoundError) and error.errno not in self._read_errors:
                self._read_errors.add(error.errno)
                logger.warning("Cannot read %s, whose KV is computed anew: %s", path, error.strerror or error)
            return False
        if problem is None:
            return True
        logger.warning("Removing %s, whose KV is computed anew: %s", path, problem)
        self.num_damaged += 1
        self._forget(key)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def unrenewed(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """The time of a use now for each file of a prefix for which no such time is known, for `renew`.

        `keys`: of the blocks of the prefix, from the first on. Reads nothing from the disk.
        """
        known, now_ns = self._known, use_time_ns(0)
        return {
            key: used_ns
            for index, key in enumerate(keys)
            if (used_ns := now_ns - index * BLOCK_STEP_NS) > known.get(key, now_ns)
        }

    def renew(self, key: bytes, used_ns: int) -> None:
        """Set the time of the last use of a file, unless a later one is known."""
        if self._known.get(key, used_ns) >= used_ns:
            return
        self._known[key] = used_ns
        path = self._folder / file_name(key)
        try:
            try:
                os.utime(path, ns=(used_ns, used_ns))
            except PermissionError:  # a file of another user
                os.utime(path)
        except FileNotFoundError:
            self._forget(key)
        except OSError:  # the folder may have become read-only
            pass

    def write(self, key: bytes, content: BlockContent, data: Bytes, used_ns: int | None = None) -> bool:
        """Write the block of this key, unless there is a file. Returns whether it was written.

        `used_ns`: the time of its last use (kv_folder), in ns; None: now. After a failure nothing is written for some
        time. The first of several failures costs a line in the log.
        """
        if not self.is_writing or self.has(key):
            return False
        packed = _pack(content)
        size = _HEADER.size + len(packed) + data.nbytes
        if size > self.max_bytes:
            return False
        if used_ns is None:
            used_ns = use_time_ns(0)
        try:
            self._make_room(size)
            self._write_within_quota(file_name(key), _header(key, packed, data) + packed, data, used_ns)
        except OSError as error:
            self._retry_s = time.monotonic() + _RETRY_S
            if not self._has_failed:
                logger.warning("Writing no KV to %s for now: %s", self._folder, error.strerror or error)
            self._has_failed = True
            return False
        if self._has_failed:
            logger.info("Writing KV to %s again", self._folder)
        self._has_failed = False
        self.used_bytes += size
        self._known[key] = used_ns
        self._note(key, is_there=True)
        return True

    def look(self) -> None:
        """Learn which files other servers have written or removed, if any. Makes a folder again that is gone."""
        with contextlib.suppress(OSError):
            if self._modified_ns() != self._scanned:
                self._scan()

    # What the folder has, for KV events

    def list_files(self) -> None:
        """From now on, `take_changes` tells all: first what has gone since the last scan, and then the files that there
        are, the last used first. So a file comes after those of the blocks before it.
        """
        self._changes = []
        with contextlib.suppress(OSError):  # then those of the last scan
            self._scan()
        self._changes = [(key, is_there) for key, is_there in self._changes if not is_there]
        files = [KVFile(used_ns, 0, key) for key, used_ns in self._known.items()]
        for file in in_order_of_use(files, latest_first=True):
            self._note(file.key, is_there=True)

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
            with open_file(self._folder / file_name(key)) as file:
                magic, version, *_, length = _unpack_header(file.read(_HEADER.size))
                packed = file.read(length)
        except FileNotFoundError:
            self._forget(key)
            return None
        except (OSError, ValueError):
            return None
        content = _unpack(packed) if (magic, version) == (_MAGIC, _VERSION) else None
        return content if content is not None and content.key == key else None

    def _note(self, key: bytes, *, is_there: bool) -> None:
        if self._changes is not None:
            self._changes.append((key, is_there))

    def _write_within_quota(self, name: str, header: bytes, data: Bytes, used_ns: int) -> None:
        """Write a file. If the disk has space but a quota or the inodes are used up, remove old files first."""
        try:
            self._write(name, header, data, used_ns)
        except OSError as error:
            if error.errno not in _IS_FULL:
                raise
            oldest_first = iter(in_order_of_use(self._scan().files))
            self._trim(oldest_first, self.used_bytes - len(header) - data.nbytes)
            self._write(name, header, data, used_ns)
            self._trim(oldest_first, int(self.used_bytes * _FILL_AFTER_TRIM))

    def _write(self, name: str, header: bytes, data: Bytes, used_ns: int) -> None:
        file, unfinished = open_unfinished(self._folder)
        with file:
            try:
                os.fchmod(file.fileno(), self._mode)
                for part in (memoryview(header), data.data):
                    while part:
                        part = part[file.write(part) :]
                os.utime(file.fileno(), ns=(used_ns, used_ns))
                os.close(os.dup(file.fileno()))  # only a close tells all errors of a network file system
                os.replace(unfinished, self._folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
                raise

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._mode = file_mode(self._folder)

    def _modified_ns(self) -> int:
        """The modification time of the folder. Raises OSError."""
        try:
            return os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            self._make_folder()
        logger.warning("The folder %s was gone, with the KV in it. It is made again", self._folder)
        self._retry_s = -math.inf
        return os.stat(self._folder).st_mtime_ns

    def _scan(self) -> Listing:
        """Look at all files. Raises OSError."""
        scanned = self._modified_ns()
        listing = list_folder(self._folder)
        before, self._known = self._known, {file.key: file.used_ns for file in listing.files}
        # No operation on whole sets, because other threads could not run meanwhile.
        gone = [key for key in before if key not in self._known]
        for key in gone:
            self.forgotten.add(key)
        if self._changes is not None:
            for key in gone:
                self._note(key, is_there=False)
            for file in in_order_of_use([one for one in listing.files if one.key not in before], latest_first=True):
                self._note(file.key, is_there=True)
        self.used_bytes = listing.num_bytes
        self._scanned = scanned if time.time_ns() - scanned > _TIME_GRAIN_NS else None
        return listing

    def _limit(self) -> int:
        """Bytes that all files may have. Raises OSError."""
        return min(self.max_bytes, self.used_bytes + spare_bytes(self._folder))

    def _make_room(self, num_bytes: int) -> None:
        """Remove files until `num_bytes` fit, and some more. Raises OSError, also if nothing could make them fit."""
        if self.used_bytes + num_bytes <= self._limit():
            return
        listing = self._scan()
        limit = self._limit()
        if num_bytes <= limit < self.used_bytes + num_bytes:
            self._trim(iter(in_order_of_use(listing.files)), int(limit * _FILL_AFTER_TRIM) - num_bytes)
        if self.used_bytes + num_bytes > limit:
            raise OSError(errno.ENOSPC, "Too little space is free")

    def _trim(self, oldest_first: Iterator[KVFile], limit: int) -> None:
        """Remove files from `oldest_first` until all files have at most `limit` bytes. It may be used again."""
        while self.used_bytes > limit and (file := next(oldest_first, None)) is not None:
            with contextlib.suppress(OSError):  # a file of another user, whose folder has the sticky bit
                (self._folder / file_name(file.key)).unlink(missing_ok=True)
                self._forget(file.key)
                self.used_bytes -= file.num_bytes
                self.num_removed += 1

    def _forget(self, key: bytes) -> None:
        """`forgotten` gets the key last, because the scheduler's thread reads it first."""
        self._known.pop(key, None)
        self._note(key, is_there=False)
        self.forgotten.add(key)


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
    if (len(packed) - end) % 4:
        return None  # token ids are int32
    try:
        return BlockContent(before, packed[_CONTENT.size : end].decode("utf-8", "surrogatepass"), packed[end:])
    except UnicodeDecodeError:
        return None


def _read(path: Path, key: bytes, target: Bytes) -> str | None:
    """Fill `target` from a file. Returns what is wrong with the file, if anything. Raises OSError."""
    with open_file(path) as file:
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
