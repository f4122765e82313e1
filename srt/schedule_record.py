"""The file of `--record-schedule`: what arrived at a scheduler, what it decided in each step, and how long steps took.

A file is a sequence of records. Each is a length (4 bytes, little endian) and an array in msgpack. The first record of
a file is a Start. A file that has reached `MAX_BYTES` becomes FILE.1, FILE.1 becomes FILE.2, and so on.

The file contains the token ids of prompts and answers. Only its owner may read it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from .io_struct import FinishReason, Resumed
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


def pack_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> bytes:
    """Token ids as 2 bytes each if the vocabulary allows it, else as 4."""
    return ids.astype(np.uint16 if vocab_size <= _NARROW else np.int32).tobytes()


def unpack_ids(data: bytes, vocab_size: int) -> npt.NDArray[np.int32]:
    """The token ids of `pack_ids`: int32 [n]."""
    return np.frombuffer(data, np.uint16 if vocab_size <= _NARROW else np.int32).astype(np.int32)


class RecordFile:
    """Writes records. An error of the disk ends the recording and not the engine."""

    def __init__(self, path: Path, start: Start, max_bytes: int = MAX_BYTES, num_kept: int = NUM_KEPT) -> None:
        """Rotates a file that exists. Raises OSError if the file cannot be made, or if the path is no file's."""
        if path.exists() and not path.is_file():  # rotation would rename a folder or a device
            raise OSError(errno.EINVAL, "is not a regular file")
        self._path = path
        self._start = start
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._encoder = msgspec.msgpack.Encoder()
        self._flushed_s = 0.0
        self._size = 0
        self._file: IO[bytes] | None = None
        self._open()

    @property
    def part(self) -> int:
        """The number of the file that is written. Older files may be dropped, so each must be readable alone."""
        return self._start.part

    def write(self, record: Record, now_s: float) -> None:
        """`now_s`: seconds from any start. The file is at most a second behind."""
        if self._file is None:
            return
        try:
            self._write(record)
            if now_s - self._flushed_s >= _FLUSH_S:
                self._flushed_s = now_s
                self._file.flush()
            if self._size >= self._max_bytes:
                self._file.close()
                self._start = msgspec.structs.replace(self._start, part=self._start.part + 1)
                self._open()
        except OSError as error:
            self._end(error)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
                self._file = None
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        """The disk has failed. What is still in the buffer is lost."""
        logger.error("The recording of the schedule ends, because %s cannot be written: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, record: Record) -> None:
        assert self._file is not None
        data = self._encoder.encode(record)
        self._file.write(_LENGTH.pack(len(data)))
        self._file.write(data)
        self._size += _LENGTH.size + len(data)

    def _open(self) -> None:
        if self._path.exists():
            self._rotate()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 16)
        self._size = 0
        self._write(self._start)

    def _rotate(self) -> None:
        for number in range(self._num_kept - 1, 0, -1):
            older = _part(self._path, number - 1)
            if older.exists():
                older.replace(_part(self._path, number))
        self._path.unlink(missing_ok=True)


class Recording:
    """The files of one scheduler, read in the order of time."""

    def __init__(self, path: Path) -> None:
        """`path`: the newest file. Raises OSError, or ValueError for a file of another kind."""
        self.start = _first(path)
        self._paths = [path]
        while (older := _part(path, len(self._paths))).exists() and _first(older).run == self.start.run:
            self._paths.append(older)
        self._paths.reverse()
        self.is_whole = _first(self._paths[0]).part == 0
        """Whether the first file is still there."""

    def records(self) -> Iterator[Record]:
        """All records but Starts. A record that was cut when the process died is left out."""
        for path in self._paths:
            yield from (record for record in _read(path) if not isinstance(record, Start))

    def ids(self, data: bytes) -> npt.NDArray[np.int32]:
        return unpack_ids(data, self.start.vocab_size)


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _first(path: Path) -> Start:
    record = next(_read(path), None)
    if not isinstance(record, Start):
        raise ValueError(f"{path} is not a recording of --record-schedule")
    if not OLDEST_VERSION <= record.version <= VERSION:
        raise ValueError(
            f"{path} is a recording of version {record.version}, but versions {OLDEST_VERSION} to {VERSION} can be read"
        )
    return record


def _read(path: Path) -> Iterator[Record]:
    decoder = msgspec.msgpack.Decoder(Record)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            data = file.read(length)
            if len(data) < length:
                return
            try:
                record: Record = decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path} is not a recording of --record-schedule: {error}") from None
            yield record
