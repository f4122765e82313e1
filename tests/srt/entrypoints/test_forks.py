"""The parent's side of a fork server, against a server that the test plays. test_fork_server.py has real ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import msgspec
import pytest

from tercet.srt.entrypoints.fork_server import MAX_MESSAGE_BYTES, Forked
from tercet.srt.entrypoints.forks import ForkLink
from tercet.srt.entrypoints.handshake import LaunchSpec
from tercet.srt.server_args import ServerArgs

SPEC = LaunchSpec(ServerArgs(model_path="A"), "/run", 0, None, -1)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def answer(server: socket.socket) -> None:
    """Takes a request, and answers it with a pidfd of this process."""
    _, fds, _, _ = socket.recv_fds(server, MAX_MESSAGE_BYTES, 3)
    pidfd = os.pidfd_open(os.getpid())
    socket.send_fds(server, [msgspec.msgpack.encode(Forked(os.getpid()))], [pidfd])
    for fd in (pidfd, *fds):
        os.close(fd)


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_cancelled_fork_leaves_no_file_open(is_answered: bool) -> None:
    async def scenario() -> None:
        link = ForkLink()
        before = open_files()
        task = asyncio.create_task(link.fork(SPEC))
        await asyncio.sleep(0)  # it has sent its request
        if is_answered:
            answer(link.childs_end)
            link._on_readable()  # as the event loop does, just before the task is cancelled
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        if not is_answered:
            answer(link.childs_end)  # too late
            link._on_readable()
        assert open_files() == before
        link.close()
        link.childs_end.close()

    asyncio.run(scenario())
