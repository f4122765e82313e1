"""The messages between the parent process and a child process.

At start-up the parent writes one frame, a LaunchSpec, to the child's stdin. The child answers with one frame, its
report, on a pipe. A forked process gets its LaunchSpec from its fork server, and has two such pipes, too. To stop the
child, the parent writes one byte, STOP, to its stdin.

A frame is a little-endian uint32 length, followed by that number of bytes of msgpack. Both pipes stay open for the life
of the engine. End of file on a pipe tells each side that the other process has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

import msgspec

from ..server_args import ServerArgs
from ..start_reports import ToParent

STOP = b"\0"
"""The byte that the parent writes to make the child stop."""
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 24
_PIPE_BYTES = 1 << 16
"""Room in a pipe, unless it is asked for more."""


class LaunchSpec(msgspec.Struct, frozen=True):
    """Everything that a child needs to start."""

    server_args: ServerArgs
    run_dir: str
    life: int
    work_dir: str | None
    """See RunDir."""
    ready_fd: int
    """File descriptor of the inherited pipe for the child's report."""
    fork_fd: int | None = None
    """That of the inherited socket to a fork server (fork_server.py). None: the process must not become one."""
    listener_fd: int | None = None
    """That of the inherited listening socket; None: the role has none."""


def write_frame(fd: int, message: LaunchSpec | ToParent) -> None:
    """Writes one frame. Raises BrokenPipeError when the other process is gone."""
    _write_all(fd, _frame(message))


def _frame(message: LaunchSpec | ToParent) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def write_spec(fd: int, spec: LaunchSpec) -> None:
    """Writes the launch spec to a child's stdin without waiting for the child, which may still import its modules.

    The pipe gets room for the spec, which Linux allows by default up to 1 MiB. Only a longer spec waits. Raises
    BrokenPipeError as `write_frame` does.
    """
    data = _frame(spec)
    if len(data) > _PIPE_BYTES:
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or it allows no pipe of this size
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, len(data))
    _write_all(fd, data)


def read_spec(fd: int) -> LaunchSpec:
    """Reads the launch spec, and blocks until the parent has written it. Raises EOFError when the parent is gone."""
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
    """Collects the bytes of a child's report until the frame is complete."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> ToParent | None:
        """The report, or None while the frame is incomplete. Raises ValueError when the bytes are not a report."""
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
