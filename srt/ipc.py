"""The links between processes: typed messages over ZeroMQ PUSH/PULL sockets, in a private directory (mode 0700).

A message that cannot be decoded or handled is logged and replaced by a `BrokenMessage`. Later messages are not lost.

The links use no pickle, no TCP ports, and no names that another engine on the host could use. Senders never block, so
queues are unbounded: a process that waits for another process could not notice that the other one has died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from .io_struct import BrokenMessage, request_ids
from .plain_values import is_utf8

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LINGER_MS = 500
_MAX_UNIX_PATH = 100  # sun_path holds 108 bytes on Linux
_REMOVE_ATTEMPTS = 100


class RunDir:
    """The private directory with the sockets of one engine.

    `life`: the number of times that the engine's processes were restarted. Each life has sockets of its own, so that
    a message from a dead process never reaches a later life.
    `work_dir`: the working directory of the engine's processes. Relative paths of the settings begin there. The process
    that has the engine may change its own directory, as a notebook may. None: a process keeps that of its parent.
    """

    def __init__(self, path: Path, life: int = 0, work_dir: str | None = None) -> None:
        self.path = path
        self.life = life
        self.work_dir = work_dir
        self.scheduler = f"ipc://{path}/{life}-scheduler"
        self.detokenizer = f"ipc://{path}/{life}-detokenizer"
        self.tokenizer = f"ipc://{path}/{life}-tokenizer"
        self.journal = path / f"{life}-journal"
        """The file of the scheduler's step journal."""
        self.grammar = f"ipc://{path}/grammar"
        self.grammar_replies = f"ipc://{path}/grammars"

    def stacks(self, role: str) -> Path:
        """The file with the stacks of a process of this life (see watchdog.py)."""
        return self.path / f"{self.life}-stacks-{role}"

    @classmethod
    def create(cls) -> RunDir:
        """Create a directory of mode 0700, in /tmp if TMPDIR is not valid UTF-8 or too long for the name of a socket.

        `work_dir` is the present working directory; None if it was removed, or if it is not valid UTF-8.
        """
        path = tempfile.mkdtemp(prefix="tercet-")
        if not is_utf8(path) or len(path.encode()) + len("/999999-detokenizer") > _MAX_UNIX_PATH:
            os.rmdir(path)
            path = tempfile.mkdtemp(prefix="tercet-", dir="/tmp")
        try:
            work_dir = os.getcwd()
        except FileNotFoundError:
            return cls(Path(path))
        return cls(Path(path), work_dir=work_dir if is_utf8(work_dir) else None)

    def next_life(self) -> RunDir:
        """The same directory, or a new one (`renewed`), with the sockets of the next life. Removes the files of this
        life."""
        for path in self.path.glob(f"{self.life}-*"):
            path.unlink(missing_ok=True)
        return RunDir(self.renewed().path, self.life + 1, self.work_dir)

    def renewed(self) -> RunDir:
        """This directory, or a new one if somebody has removed this one, such as a program that cleans /tmp."""
        return self if self.path.exists() else RunDir(self.create().path, self.life, self.work_dir)

    def remove(self) -> None:
        """Remove the directory and its files. Repeated, because a starting process may create a file meanwhile.

        Never raises OSError.
        """
        for _ in range(_REMOVE_ATTEMPTS):
            shutil.rmtree(self.path, ignore_errors=True)
            if not self.path.exists():
                return


class Sender(Generic[T]):
    """The sending end of a link."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        """Raises OSError if this process can have no more sockets."""
        self._socket = _socket(context, zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: T) -> None:
        """Queue a message. Never blocks and never raises zmq.Again, because the queue is unbounded."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """The receiving end of a link, for a synchronous loop. `union`: the type of the messages."""

    def __init__(self, context: zmq.Context[Any], address: str, union: Any) -> None:
        """Raises OSError if there is no room for the socket's file, or if this process can have no more sockets."""
        self._socket = _socket(context, zmq.PULL)
        self._socket.set_hwm(0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            assert error.errno is not None
            raise OSError(error.errno, os.strerror(error.errno), address.removeprefix("ipc://")) from None
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def drain(self) -> list[T | BrokenMessage]:
        """Return all messages that have arrived, without waiting."""
        messages: list[T | BrokenMessage] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frame))
            except Exception:  # not only msgspec's errors: structs also check their values
                logger.exception("Could not decode a message of %d bytes", len(frame))
                messages.append(BrokenMessage(_request_ids_of(frame), "a message of this request could not be decoded"))

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message has arrived or the time is over. Returns whether a message has arrived."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[T]):
    """The receiving end of a link in an event loop. Calls `on_message` for each message.

    If `on_message` raises an exception, it is called once more, with a `BrokenMessage` for the requests of the message.

    The loop watches ZeroMQ's file descriptor. The descriptor is edge-triggered, so each wake-up drains the socket.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, union: Any, on_message: Callable[[T | BrokenMessage], None]
    ) -> None:
        self._receiver: Receiver[T] = Receiver(context, address, union)
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._receiver._socket.fileno(), self._drain)
        loop.call_soon(self._drain)  # earlier messages trigger no edge

    def _drain(self) -> None:
        if self._loop is None:
            return
        for message in self._receiver.drain():
            try:
                self._on_message(message)
            except Exception:
                logger.exception("Could not handle a message")
                self._report_broken(message)

    def _report_broken(self, message: T | BrokenMessage) -> None:
        rids = request_ids(msgspec.to_builtins(message))
        try:
            self._on_message(BrokenMessage(rids, "a message of this request could not be handled"))
        except Exception:
            logger.exception("Could not end requests %s", ", ".join(rids))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._receiver._socket.fileno())
            self._loop = None
        self._receiver.close()


def _socket(context: zmq.Context[Any], kind: int) -> Any:
    """A socket. Raises OSError, which callers report as any other lack of open files."""
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from None


def _request_ids_of(frame: bytes) -> list[str]:
    """The ids of the requests that a msgpack frame names; none if the frame is not valid msgpack."""
    try:
        return request_ids(msgspec.msgpack.decode(frame))
    except msgspec.DecodeError:
        return []
