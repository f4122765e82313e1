"""The file of `--record-schedule`: what arrived at a scheduler, what it decided in each step, and how long steps took.

A file is a sequence of records. Each is a length (4 bytes, little endian) and an array in msgpack. The first record of
a file is a Start. A file that has reached `MAX_BYTES` becomes FILE.1, FILE.1 becomes FILE.2, and so on. Each file can
be read without the others, so what is damaged in one costs at most the rest of that file. `FILE.lock` is locked while a
process records.

The file contains the token ids of prompts and answers. Only its owner may read it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np

from .arrays import Int32Array
from .io_struct import FinishReason, Resumed
from .record_file import lock_beside
from .request_options import RequestOptions

logger = logging.getLogger(__name__)

VERSION = 2
"""Since version 2 the times of steps are those that the planner saw, and `max_itl_ms` is a number or a word."""
OLDEST_VERSION = 1
"""The oldest that can be read."""
MAX_BYTES = 64 << 20
NUM_KEPT = 16
"""Files that are kept, the newest ones."""
_FLUSH_S = 1.0
_RETRY_S = 60.0
"""How long nothing is recorded after the disk has failed."""
_LENGTH = struct.Struct("<I")
_NARROW = 1 << 16


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """The scheduler, at the beginning of each file."""

    version: int
    run: str
    """The files of one scheduler have the same."""
    part: int
    """0 in the first file of a scheduler."""
    server_args: dict[str, Any]
    page_size: int
    context_len: int
    max_running_requests: int
    max_prefill_tokens: int
    chunked_prefill_size: int
    max_total_num_tokens: int
    vocab_size: int
    is_asynchronous: bool
    equal_cost_depth: float | None = None
    """Of the eviction policy `value`. None: the recording is older."""
    follows_gap: bool = False
    """Records before this file are missing, because the disk had failed."""
    max_saved_states: int | None = None


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag="arrival"):
    """A request. Times are seconds on the scheduler's clock; a turn is one pass of its loop, counted from 1."""

    turn: int
    at_s: float
    number: int
    """Requests are numbered from 0 in the order of arrival."""
    ids: bytes
    options: RequestOptions
    resumed: Resumed | None = None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """A client left. `number` None: all clients."""

    turn: int
    at_s: float
    number: int | None


class Retain(msgspec.Struct, frozen=True, array_like=True, tag="retain"):
    """A request that has ended was a tool call, so its prefix is retained."""

    turn: int
    at_s: float
    number: int
    seconds: float


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Somebody asked to empty the prefix cache."""

    turn: int
    at_s: float


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What a step computed. Arrays are int32 bytes."""

    turn: int
    start_s: float
    """When it was launched or, if that is later, when the tokens of the step before were on the host. The planner has
    learned from `end_s - start_s`. In version 1: when it was launched."""
    end_s: float
    """When its tokens were on the host."""
    num_decodes: int
    rows: bytes | None = None
    """[B]. None: the step decodes the rows of the step before, each with one token more. The first step of a file has
    rows."""
    seq_lens: bytes = b""
    extend_lens: bytes | None = None
    """None: a decode step."""


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """A request ended. `ids`: its output."""

    turn: int
    at_s: float
    number: int
    first_token_s: float | None
    """When its first token left the scheduler; None: it has none."""
    ids: bytes
    finish: FinishReason


Record = Start | Arrival | Abort | Retain | Flush | Step | End
_BEGIN = re.compile(rb"[\x90-\x9f](?:\xa7arrival|\xa5abort|\xa6retain|\xa5flush|\xa4step|\xa3end)")
"""The begin of a record, as it is encoded: a short array, and its tag."""


def narrow_ids(ids: Int32Array, vocab_size: int) -> bytes:
    """Token ids as 2 bytes each if the vocabulary allows it, else as 4."""
    return ids.astype(np.uint16 if vocab_size <= _NARROW else np.int32).tobytes()


def widened_ids(data: bytes, vocab_size: int) -> Int32Array:
    """The token ids of `narrow_ids`: int32 [n]."""
    return np.frombuffer(data, np.uint16 if vocab_size <= _NARROW else np.int32).astype(np.int32)


class ScheduleFile:
    """Writes records. An error of the disk stops the recording for a while, and nothing else. It goes on in a new
    file."""

    def __init__(
        self,
        path: Path,
        start: Start,
        max_bytes: int = MAX_BYTES,
        num_kept: int = NUM_KEPT,
        *,
        may_begin_later: bool = False,
    ) -> None:
        """Rotates a file that exists. Raises OSError if the path is no regular file, if another process records to it,
        or if the file cannot be made.

        `may_begin_later`: if the file cannot be made, the recording begins when the disk has room.
        """
        if path.exists() and not path.is_file():  # rotation would rename a folder or a device
            raise OSError(errno.EINVAL, "is not a regular file")
        self._path = path
        self._start = start
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._encoder = msgspec.msgpack.Encoder()
        self._flushed_s = 0.0
        self._size = 0
        self._retry_s: float | None = None
        """When a new file is tried, if there is none. None: that much later than the next record."""
        self._lock: int | None = None
        """The descriptor of the locked `FILE.lock`."""
        self._file: IO[bytes] | None = None
        try:
            self._file = self._open(start)
        except OSError as error:
            if not may_begin_later:
                self.close()
                raise
            self._end(error)

    @property
    def part(self) -> int:
        """The number of the file that is written. Older files may be dropped, so each must be readable alone."""
        return self._start.part

    def write(self, record: Record, now_s: float) -> None:
        """`now_s`: seconds from any start. The file is at most a second behind."""
        if self._file is None:
            self._try_again(now_s)  # this record is lost, too: it may refer to another one that is
            return
        try:
            self._size += self._write(self._file, record)
            if now_s - self._flushed_s >= _FLUSH_S:
                self._flushed_s = now_s
                self._file.flush()
            if self._size >= self._max_bytes:
                self._file.close()
                self._begin_part(follows_gap=False)
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        """Nothing is recorded after it."""
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._end(error)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._retry_s = math.inf

    def _end(self, error: OSError) -> None:
        """The disk has failed. What is still in the buffer is lost."""
        logger.error("The recording of the schedule stops, because %s cannot be written: %s", self._path, error)
        file, self._file = self._file, None
        self._retry_s = None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _try_again(self, now_s: float) -> None:
        """Begins a new file, if it is time and if the disk has room for a whole one."""
        if self._retry_s is None:
            self._retry_s = now_s + _RETRY_S
        if now_s < self._retry_s:
            return
        self._retry_s = now_s + _RETRY_S
        with contextlib.suppress(OSError):
            if _free_bytes(self._path.parent) >= self._max_bytes:
                self._begin_part(follows_gap=True)
                logger.info("The recording of the schedule goes on in a new file %s", self._path)

    def _begin_part(self, *, follows_gap: bool) -> None:
        start = msgspec.structs.replace(self._start, part=self._start.part + 1, follows_gap=follows_gap)
        self._file = self._open(start)
        self._start = start

    def _write(self, file: IO[bytes], record: Record) -> int:
        """Returns the number of bytes."""
        data = self._encoder.encode(record)
        file.write(_LENGTH.pack(len(data)))
        file.write(data)
        return _LENGTH.size + len(data)

    def _open(self, start: Start) -> IO[bytes]:
        """Begins a file. The older ones are renamed only if that has succeeded. Raises OSError."""
        if self._lock is None:
            self._lock = lock_beside(self._path)
        if self._lock is None:
            raise OSError(errno.EBUSY, "is in use by another server")
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)  # it may be a link, or open to others
        file = os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=1 << 16)
        try:
            self._size = self._write(file, start)
            file.flush()
            if self._path.exists():
                self._rotate()
            new.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        return file

    def _rotate(self) -> None:
        for number in range(self._num_kept - 1, 0, -1):
            older = _part(self._path, number - 1)
            if older.exists():
                older.replace(_part(self._path, number))


class _Damage(NamedTuple):
    """The rest of a file that cannot be read: where a record begins is known only from the one before."""

    at: int
    """Bytes of the file before it."""
    num_bytes: int
    num_records: int
    """Probably: so many beginnings of records are in it. At least 1."""


class Recording:
    """The files of one scheduler, read in the order of time."""

    def __init__(self, path: Path) -> None:
        """`path`: the newest file. Raises OSError, or ValueError for a file of another kind."""
        self.start = _first(path)
        self.is_whole = not self.start.follows_gap
        """Whether no record is missing before the last one that `records` yields. `records` finds damaged files."""
        self._paths = [path]
        part, number = self.start.part, 0
        while part > 0 and (older := _part(path, number := number + 1)).exists():
            try:
                start = _first(older)
            except ValueError as error:
                logger.warning("%s, so it is left out", error)
                continue
            if start.run != self.start.run:
                break
            self.is_whole &= start.part == part - 1 and not start.follows_gap
            self._paths.append(older)
            part = start.part
        self.is_whole &= part == 0
        self._paths.reverse()

    def records(self) -> Iterator[Record]:
        """All records but Starts. The rest of a file after a cut or damaged record is left out, with a line in the log.
        A process that dies leaves a record that is cut at the end of the newest file."""
        for path in self._paths:
            for record in _read(path):
                if isinstance(record, _Damage):
                    self.is_whole &= path == self._paths[-1]
                    logger.warning(
                        "%s is cut or damaged at byte %d: the last %d bytes are left out, probably %d record(s)",
                        path,
                        *record,
                    )
                elif not isinstance(record, Start):
                    yield record

    def ids(self, data: bytes) -> Int32Array:
        return widened_ids(data, self.start.vocab_size)


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _free_bytes(folder: Path) -> float:
    """Free bytes of the disk. Raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf  # some network file systems do not tell


def _first(path: Path) -> Start:
    record = next(_read(path), None)
    if not isinstance(record, Start):
        raise ValueError(f"{path} is not a recording of --record-schedule")
    if not OLDEST_VERSION <= record.version <= VERSION:
        raise ValueError(
            f"{path} is a recording of version {record.version}, but versions {OLDEST_VERSION} to {VERSION} can be read"
        )
    return record


def _read(path: Path) -> Iterator[Record | _Damage]:
    """The records of a file. A _Damage is the last one, if there is any."""
    decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
    with path.open("rb") as file:
        at, size = 0, os.fstat(file.fileno()).st_size
        while at < size:
            head = file.read(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
            end = at + _LENGTH.size + length
            try:
                if end > size:
                    raise ValueError("the record is not complete")
                record = decoder.decode(file.read(length))
            except ValueError:  # DecodeError is one
                file.seek(at)
                rest = file.read()
                yield _Damage(at, len(rest), max(len(_BEGIN.findall(rest)), 1))
                return
            yield record
            at = end
