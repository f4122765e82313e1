"""An append-only file of checksummed records. However its writer ends, the complete records stay readable.

    file:    MAGIC, mark (8 random bytes), records
    record:  mark, length of the payload (4 bytes), CRC-32 of mark and payload (4 bytes), payload

A record that was cut or changed is skipped. The next one is found by the mark. Clients cannot know the mark, so no text
of theirs looks like a record.

A record that has been written survives the death of the process, not that of the machine: `append` leaves it to the
system when the data reach the disk. `write_new` waits for the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = b"TERCETR1"
_MARK_BYTES = 8
_SIZES = struct.Struct("<II")
_HEAD_BYTES = _MARK_BYTES + _SIZES.size


class Found(NamedTuple):
    """A whole record of a file. `framed`: its bytes in the file."""

    framed: memoryview
    payload: memoryview


def frame(mark: bytes, payload: bytes) -> bytes:
    """The record of a payload."""
    return b"%b%b%b" % (mark, _SIZES.pack(len(payload), zlib.crc32(payload, zlib.crc32(mark))), payload)


def whole_records(data: bytes, mark: bytes, start: int = 0) -> Iterator[Found | int]:
    """The records from this offset on, and for each gap between them the offset where it begins."""
    view, at, first = memoryview(data), start, zlib.crc32(mark)
    while at < len(data):
        found = _record_at(view, at, mark, first)
        if found is not None:
            yield found
            at += len(found.framed)
            continue
        yield at
        while found is None and at >= 0:
            at = data.find(mark, at + 1)
            found = _record_at(view, at, mark, first) if at >= 0 else None
        if at < 0:
            return


def _record_at(view: memoryview, at: int, mark: bytes, first: int) -> Found | None:
    if len(view) - at < _HEAD_BYTES or view[at : at + _MARK_BYTES] != mark:
        return None
    length, checksum = _SIZES.unpack_from(view, at + _MARK_BYTES)
    framed = view[at : at + _HEAD_BYTES + length]
    payload = framed[_HEAD_BYTES:]
    if len(payload) != length or zlib.crc32(payload, first) != checksum:
        return None
    return Found(framed, payload)


def lock_beside(path: Path) -> int | None:
    """Locks `FILE.lock`. The lock is free again when the descriptor is closed, or when the process ends.

    Returns the descriptor, or None if another process has the lock. Raises OSError.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return lock


class RecordFile:
    """The file of one process. `FILE.lock` is locked while the process lives, so no other one shares the file."""

    def __init__(self, path: Path, lock: int, file: int, mark: bytes) -> None:
        self.path = path
        self.mark = mark
        self.size = os.fstat(file).st_size
        """Up to here the file is as this process wrote it."""
        self._lock = lock
        self._file = file

    @classmethod
    def open(cls, path: Path) -> tuple[RecordFile, bytes]:
        """The file, which is created if it is missing, and its content. Records begin at `RECORDS_START`.

        Raises ValueError for a file that another process uses or that is no such file, and OSError.
        """
        lock = lock_beside(path)
        if lock is None:
            raise ValueError(f"the file {str(path)!r} is in use by another server")
        file = -1
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise ValueError(f"{str(path)!r} must be a regular file")
            os.fchmod(file, 0o600)
            data = path.read_bytes()
            if data[: len(MAGIC)] != MAGIC[: len(data)]:
                raise ValueError(f"the file {str(path)!r} has other content; name a new file")
            mark = data[len(MAGIC) : RECORDS_START]
            if len(mark) < _MARK_BYTES:
                mark, data = os.urandom(_MARK_BYTES), b""
            return cls(path, lock, file, mark), data
        except BaseException:
            if file >= 0:
                os.close(file)
            os.close(lock)
            raise

    def append(self, framed: bytes | bytearray) -> None:
        """Writes records. Raises OSError, and then leaves the file as it was."""
        try:
            _write(self._file, self.size, framed)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size += len(framed)

    def write_new(self, framed: list[bytes]) -> int:
        """Writes these records to a new file beside this one, and to the disk. May run in a thread. Raises OSError.

        Returns its descriptor, for `adopt`.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._new_path)  # it may be a link, or open to others
        file = os.open(self._new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            at = 0
            for part in (MAGIC + self.mark, *framed):
                _write(file, at, part)
                at += len(part)
            os.fsync(file)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(self._new_path)
            raise
        return file

    def adopt(self, file: int, more: bytes | bytearray) -> None:
        """Replaces the file by that of `write_new`, with these records at its end. Raises OSError."""
        try:
            size = os.fstat(file).st_size
            _write(file, size, more)
            os.rename(self._new_path, self.path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self.size = file, size + len(more)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._lock)

    @property
    def _new_path(self) -> str:
        return f"{self.path}.new"


RECORDS_START = len(MAGIC) + _MARK_BYTES


def _write(file: int, at: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(file, view, at)
        view, at = view[done:], at + done
