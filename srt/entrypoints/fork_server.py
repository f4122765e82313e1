"""The fork server: a process that has loaded the model, and forks a scheduler for each life of the engine.

A forked process shares the memory of the weights with the fork server, since neither writes to them. So the next life
of the engine neither loads nor packs weights, and no memory is needed for a second copy. The fork server itself only
waits. It has no threads that compute, no sockets of ZeroMQ and no device: nothing of these survives a fork.

The parent sends FORK over a socket, with three file descriptors: the stdin of the new process, its pipe for reports,
and a file in memory with its LaunchSpec. That may be longer than a message of the socket. The answer is Forked, with a
pidfd, or ForkFailed. Ended tells how a forked process has ended, because only its own parent, the fork server, can wait
for it.
"""

from __future__ import annotations

import os
import select
import socket

import msgspec

from .handshake import LaunchSpec, read_spec

FORK = b"fork"
MAX_MESSAGE_BYTES = 1 << 12


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """A process was forked. The message has its pidfd."""

    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag="fork_failed"):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A forked process has ended."""

    pid: int
    returncode: int
    """As of subprocess: minus the signal."""


FromForkServer = Forked | ForkFailed | Ended


def serve_forks(fork_fd: int) -> LaunchSpec:
    """Forks a process for each request. Returns in the forked processes only; their stdin is their own.

    `fork_fd`: the socket to the parent. The process exits when the parent closes it.
    """
    link = socket.socket(fileno=fork_fd)
    running: dict[int, int] = {}  # process ids by pidfd
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                poll.unregister(fd)
                os.close(fd)
                pid, status = os.waitpid(running.pop(fd), 0)
                _tell(link, Ended(pid, os.waitstatus_to_exitcode(status)))
                continue
            data, fds, _, _ = socket.recv_fds(link, MAX_MESSAGE_BYTES, 3)
            if not data:
                os._exit(0)
            try:
                pid = os.fork()
            except OSError as error:
                _tell(link, ForkFailed(error.strerror or str(error)))
            else:
                if pid == 0:
                    return _begin(fds, link, running)
                pidfd = os.pidfd_open(pid)
                running[pidfd] = pid
                poll.register(pidfd, select.POLLIN)
                _tell(link, Forked(pid), pidfd)
            for one in fds:
                os.close(one)


def _begin(fds: list[int], link: socket.socket, pidfds: dict[int, int]) -> LaunchSpec:
    """In the forked process: it keeps its own file descriptors only."""
    for fd in pidfds:
        os.close(fd)
    link.close()
    stdin, ready_fd, spec_fd = fds
    os.dup2(stdin, 0, inheritable=False)
    os.close(stdin)
    spec = read_spec(spec_fd)
    os.close(spec_fd)
    return msgspec.structs.replace(spec, ready_fd=ready_fd)


def _tell(link: socket.socket, message: FromForkServer, *fds: int) -> None:
    try:
        socket.send_fds(link, [msgspec.msgpack.encode(message)], fds)
    except OSError:
        os._exit(1)  # the parent is gone
