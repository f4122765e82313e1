"""What a parent and a child tell each other: one frame down the child's stdin and one frame up a pipe while it starts,
and one byte down its stdin when it shall stop.

A frame is a little-endian uint32 length and that many bytes of msgpack. Both pipes stay open for the life of the
engine: their end of file is how each side learns of the other's death, however that came.
"""

from __future__ import annotations

import os
import struct

import msgspec

from ..io_struct import ToParent
from ..server_args import ServerArgs

STOP = b"\0"
"""What the parent writes, after the launch spec, when the child shall end."""
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 24


class LaunchSpec(msgspec.Struct, frozen=True):
    """Everything a child has to know."""

    server_args: ServerArgs
    run_dir: str
    ready_fd: int
    """The inherited pipe on which the child reports."""


def write_frame(fd: int, message: LaunchSpec | ToParent) -> None:
    """Raises BrokenPipeError when the other side is gone."""
    payload = msgspec.msgpack.encode(message)
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def read_spec(fd: int) -> LaunchSpec:
    """Blocks until the parent has sent it; raises EOFError when the parent is gone before."""
    (length,) = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size))
    return msgspec.msgpack.decode(_read_exactly(fd, length), type=LaunchSpec)


def _read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError("the parent process is gone")
        data += piece
    return data


class ReportReader:
    """Collects what a child wrote until its frame is whole."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> ToParent | None:
        """The report, once it is there. Raises ValueError when the bytes are no report."""
        self._data += data
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > _MAX_FRAME_BYTES:
            raise ValueError(f"a start-up report must not have {length} bytes")
        if len(self._data) < _LENGTH.size + length:
            return None
        payload = self._data[_LENGTH.size : _LENGTH.size + length]
        self._data = self._data[_LENGTH.size + length :]
        return msgspec.msgpack.decode(payload, type=ToParent)  # type: ignore[no-any-return]
