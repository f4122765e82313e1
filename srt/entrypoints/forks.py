"""The parent's side of a fork server (fork_server.py): it asks for processes, and hears how they end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import select
import signal
import socket
from collections.abc import Callable

import msgspec

from ..machine.process_state import exit_code_of_zombie
from .fork_server import FORK, MAX_MESSAGE_BYTES, Ended, Forked, FromForkServer
from .handshake import LaunchSpec, write_frame

UNKNOWN_EXIT = 256
"""The code of a process whose exit status was lost with its fork server. Real codes are at most 255."""
_TIMEOUT_S = 5.0


class ForkServerDied(OSError):
    """There is no fork server any more."""

    def __init__(self) -> None:
        super().__init__("the fork server has died")


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen` that ChildProcess uses."""

    def __init__(self, pid: int, pidfd: int, stdin: io.FileIO, server_is_gone: Callable[[], bool]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._server_is_gone = server_is_gone

    def on_end(self, returncode: int) -> None:
        if self.returncode is None:
            self.returncode = returncode
            os.close(self._pidfd)

    def poll(self) -> int | None:
        """The exit code. It is known once the process has ended, even while the fork server is stopped."""
        if self.returncode is None and self._has_ended():
            code = _exit_code_of_orphan(self.pid) if self._server_is_gone() else exit_code_of_zombie(self.pid)
            if code is not None:  # otherwise the fork server tells it
                self.on_end(code)
        return self.returncode

    def send_signal(self, signum: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def kill(self) -> None:
        """If the process has ended already, and the fork server does not say how, its exit code stays unknown."""
        if self.returncode is None and self._has_ended():
            self.on_end(UNKNOWN_EXIT)
        self.send_signal(signal.SIGKILL)

    def _has_ended(self) -> bool:
        poll = select.poll()  # select.select takes no file descriptor from 1024 on
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


def _exit_code_of_orphan(pid: int) -> int:
    """The exit code of an ended process that its fork server did not wait for. It is known only if this process has
    inherited it, as process 1 of a container does."""
    try:
        waited_pid, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN_EXIT
    return os.waitstatus_to_exitcode(status) if waited_pid else UNKNOWN_EXIT


class ForkLink:
    """The socket to a fork server. It belongs to the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, self.childs_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """`childs_end`: to be inherited by the process that becomes the fork server, and closed here."""
        self._socket.setblocking(False)
        self._answer: asyncio.Future[tuple[Forked, int]] | None = None
        self._forked: dict[int, ForkedProcess] = {}
        self._loop.add_reader(self._socket, self._on_readable)

    async def fork(self, spec: LaunchSpec) -> tuple[ForkedProcess, int]:
        """A new process, and the end of its pipe for reports. Raises ForkServerDied, or another OSError if there is
        none."""
        if self._socket.fileno() < 0:
            raise ForkServerDied
        childs_stdin, stdin = os.pipe()
        try:
            ready_fd, childs_ready_fd = os.pipe()
        except BaseException:
            os.close(childs_stdin)
            os.close(stdin)
            raise
        try:
            self._answer = self._loop.create_future()
            with io.FileIO(os.memfd_create("launch-spec"), "r+") as spec_file:
                write_frame(spec_file.fileno(), spec)
                spec_file.seek(0)
                socket.send_fds(self._socket, [FORK], [childs_stdin, childs_ready_fd, spec_file.fileno()])
            async with asyncio.timeout(_TIMEOUT_S):
                forked, pidfd = await self._answer
        except BaseException as error:
            os.close(stdin)
            os.close(ready_fd)
            self._close_answer()
            if isinstance(error, TimeoutError):
                raise OSError("the fork server does not answer") from None
            if isinstance(error, BrokenPipeError):
                raise ForkServerDied from None
            raise
        finally:
            self._answer = None
            os.close(childs_stdin)
            os.close(childs_ready_fd)
        process = ForkedProcess(forked.pid, pidfd, io.FileIO(stdin, "w"), lambda: self._socket.fileno() < 0)
        self._forked[forked.pid] = process
        return process, ready_fd

    def _close_answer(self) -> None:
        """Closes the pidfd of an answer that came just before the task was cancelled, so that nobody has taken it."""
        answer = self._answer
        if answer is not None and answer.done() and not answer.cancelled() and answer.exception() is None:
            os.close(answer.result()[1])

    def close(self) -> None:
        """Ends the fork server. Its processes go on."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ForkServerDied())

    def _on_readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        except ConnectionResetError:  # it died with a request unread
            data, fds = b"", []
        if not data:
            return self.close()
        message: FromForkServer = msgspec.msgpack.decode(data, type=FromForkServer)
        if isinstance(message, Ended):
            process = self._forked.pop(message.pid, None)
            if process is not None:
                process.on_end(message.returncode)
        elif self._answer is None or self._answer.done():
            for fd in fds:
                os.close(fd)  # nobody waits for it any more; it ends, because its stdin is closed
        elif isinstance(message, Forked) and not fds:  # the kernel drops one that this process has no room for
            self._answer.set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        elif isinstance(message, Forked):
            self._answer.set_result((message, fds[0]))
        else:
            self._answer.set_exception(OSError(f"the fork server cannot fork: {message.reason}"))
