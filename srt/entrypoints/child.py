"""A child process of the engine: `python -m tercet.srt.entrypoints.child PARENT ROLE`, started by processes.py.

`PARENT` is the process id of its parent. The child reads its launch spec from stdin and reports on the pipe that the
spec names. It ignores SIGINT, SIGTERM and SIGHUP: the parent lets running requests finish, and then tells it to stop.
When the parent dies, for any reason, the child removes the run directory and exits at once, so that nothing of the
engine is left behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from .. import log
from ..errors import TercetError
from ..grammar_spec import CheckGrammarReply, CheckGrammarReq
from ..io_struct import ToDetokenizer, ToTokenizer
from ..ipc import Receiver, RunDir, Sender
from ..plain_values import reason_of
from ..server_args import ServerArgs
from ..start_reports import DetokenizerReady, GrammarWorkerReady, Loaded, Ready, StartFailed, ToParent
from .fork_server import serve_forks
from .handshake import STOP, LaunchSpec, read_spec, write_frame
from .watchdog import answer_with_stacks

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

logger = logging.getLogger("tercet.child")  # __name__ is __main__ here

OnReady = Callable[[Ready], None]
ShouldStop = Callable[[], bool]
Run = Callable[..., None]
"""Runs a role until `should_stop()` is true. Calls `on_ready` once, when the role is ready.

Its arguments are ServerArgs, RunDir, OnReady and ShouldStop. An HTTP worker also gets its `listener`.
"""

_STDIN = 0
_PARENT_POLL_S = 0.5
_PARENT_END_S = 1.0
_LOWEST_PRIORITY = 19
_LOAD_POLL_S = 0.05
_LOAD_GRACE_S = 2.0
"""How long a spare process that gets its spec goes on to load its modules at the lowest priority."""
_MODULES = {"scheduler": "...managers.scheduler_process"}
"""What a spare process of a role imports."""


def load_scheduler_role(server_args: ServerArgs) -> Any:
    # Imported here: only this role needs torch, whose import takes seconds.
    from ...managers.scheduler_process import load_model
    from ..model_files.load_config import load_model_config

    return load_model(server_args, load_model_config(server_args.model_path, server_args.load_format))


def run_scheduler_role(loaded: Any, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop) -> None:
    # Imported here, as above.
    from ...managers.scheduler_process import run_scheduler

    run_scheduler(loaded, run_dir, on_ready, should_stop)


def load_detokenizer_role(server_args: ServerArgs) -> LoadedTokenizer:
    # Imported here: the scheduler process needs neither module.
    from ...managers import detokenizer_manager  # noqa: F401  # not again in each fork
    from ..text.tokenizer import load_tokenizer

    if server_args.skip_tokenizer_init:
        return LoadedTokenizer(None)
    return LoadedTokenizer(load_tokenizer(server_args.model_path, server_args.tokenizer_path))


def run_detokenizer_role(loaded: LoadedTokenizer, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop) -> None:
    # Imported here, as above.
    from ...managers.detokenizer_manager import run_detokenizer

    context = zmq.Context()
    receiver: Receiver[ToDetokenizer] = Receiver(context, run_dir.detokenizer, ToDetokenizer)
    sender: Sender[ToTokenizer] = Sender(context, run_dir.tokenizer)
    on_ready(DetokenizerReady())
    run_detokenizer(receiver, sender, loaded.tokenizer, should_stop)
    receiver.close()
    sender.close()
    context.term()


def run_grammar_role(server_args: ServerArgs, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop) -> None:
    # Imported here: the other processes need none of them.
    from ...managers.grammar_backends import make_compiler
    from ...managers.grammar_worker import grammar_vocabulary, limit_resources, run_grammar_worker
    from ..model_files.load_config import load_model_config
    from ..text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(server_args.model_path, server_args.tokenizer_path)
    model_config = load_model_config(server_args.model_path, server_args.load_format)
    vocabulary = grammar_vocabulary(tokenizer, model_config)
    compiler = make_compiler(server_args.grammar_backend, vocabulary, only_check=True)
    context = zmq.Context()
    receiver: Receiver[CheckGrammarReq] = Receiver(context, run_dir.grammar, CheckGrammarReq)
    sender: Sender[CheckGrammarReply] = Sender(context, run_dir.grammar_replies)
    limit_resources()
    on_ready(GrammarWorkerReady())
    run_grammar_worker(receiver, sender, compiler, vocabulary.num_words, should_stop)
    receiver.close()
    sender.close()
    context.term()


def run_http_worker_role(
    server_args: ServerArgs, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop, listener: socket.socket
) -> None:
    # Imported here: the other processes have no HTTP.
    from .http_worker import run_http_worker

    run_http_worker(server_args, run_dir, on_ready, should_stop, listener)


class LoadedTokenizer(NamedTuple):
    """What a detokenizer needs that takes long to load."""

    tokenizer: Tokenizer | None
    may_fork: bool = True

    def with_settings(self, server_args: ServerArgs) -> LoadedTokenizer:
        """It depends on none of those that may change."""
        return self


class LoadedRole(NamedTuple):
    """A role that loads a model or a tokenizer before it runs. Then the process may become a fork server."""

    load: Callable[[ServerArgs], Any]
    """The result has the attribute `may_fork`, and `with_settings`, which changes the settings in a fork. What is
    loaded stays: only the adapters may differ."""
    run: Callable[[Any, RunDir, OnReady, ShouldStop], None]


ROLES: Mapping[str, Run | LoadedRole] = {
    "scheduler": LoadedRole(load_scheduler_role, run_scheduler_role),
    "detokenizer": LoadedRole(load_detokenizer_role, run_detokenizer_role),
    "grammar": run_grammar_role,
    "http_worker": run_http_worker_role,
}


def main(roles: Mapping[str, Run | LoadedRole] = ROLES) -> int:
    """Runs the child process. Returns the exit code: 0 after a requested stop, 1 after a failure."""
    role = sys.argv[2]
    parent = _Parent(int(sys.argv[1]))
    # Imported and loaded objects stay for the life of the process. Collections during start-up would take 0.2 s.
    gc.disable()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the parent decides what they mean
    _enter(None)
    try:
        if not _has_spec(0):
            _load_modules(role)
        while not _has_spec(_PARENT_POLL_S):
            if parent.is_gone():
                return 1
        spec = read_spec(_STDIN)
    except EOFError:
        return 1
    _enter(spec.work_dir)
    log.configure(role, spec.server_args.log_level, spec.server_args.log_format)
    life = _Life(role, spec, parent)
    run = roles[role]
    try:
        if isinstance(run, LoadedRole):
            return _run_model(run, life)
        if spec.listener_fd is None:
            return life.run(run, spec.server_args)
        with socket.socket(fileno=spec.listener_fd) as listener:
            return life.run(partial(run, listener=listener), spec.server_args)
    finally:
        if parent.is_gone():  # without removing it
            life.run_dir.remove()


def _enter(folder: str | None) -> None:
    """Changes to a folder (None: the present one), or to / if that is not possible, such as after its removal.

    oneMKL ends a process that computes its first product in a removed folder.
    """
    try:
        os.chdir(os.getcwd() if folder is None else folder)
    except OSError:
        os.chdir("/")  # absolute paths do not need the folder


def _has_spec(timeout_s: float) -> bool:
    """Waits until the launch spec, or the end of the parent, can be read from stdin."""
    return bool(select.select([_STDIN], [], [], timeout_s)[0])


def _load_modules(role: str) -> None:
    """Imports what a spare process will need, at the lowest priority: it must not slow the running engine down.

    A process cannot raise its priority again, but on Linux a priority belongs to a thread. Beside programs that use all
    cores, that thread may take minutes. If the spec comes meanwhile, this function does not return: the program starts
    again at the usual priority, and finds the spec on stdin.
    """
    module = _MODULES.get(role)
    if module is None:
        return

    def load() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        with contextlib.suppress(Exception):  # the role imports it again, and reports the error
            importlib.import_module(module, __package__)

    thread = threading.Thread(target=load)
    thread.start()
    while thread.is_alive() and not _has_spec(_LOAD_POLL_S):
        pass
    thread.join(_LOAD_GRACE_S)
    if thread.is_alive():
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _Parent:
    """The process that has started this one. A fork of this process has the same."""

    def __init__(self, pid: int) -> None:
        """`pid`: from the parent itself, which may have died while this process imported its modules."""
        self._pid = pid
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not Linux, an old kernel, or there is no such process
            self._pidfd = None
        self._was_gone = os.getppid() != pid
        """It had died before. Another process may have its id by now."""

    @property
    def outlives_forks(self) -> bool:
        """Whether forks of this process can see the end of the parent."""
        return self._pidfd is not None

    def is_gone(self) -> bool:
        if self._was_gone:
            return True
        if self._pidfd is None:
            return os.getppid() != self._pid
        return bool(select.select([self._pidfd], [], [], 0)[0])


class _StopRequest:
    """Set when the parent asks this process to stop. A process that is still starting exits at once."""

    def __init__(self) -> None:
        self.is_ready = False
        self._event = threading.Event()

    def set(self) -> None:
        if not self.is_ready:
            os._exit(0)  # the main thread may be loading weights for minutes
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()


class _Life:
    """What a process does from its launch on: it watches the parent, and reports that it is ready, or why it is not."""

    def __init__(self, role: str, spec: LaunchSpec, parent: _Parent) -> None:
        self.role = role
        self.spec = spec
        self.parent = parent
        self.run_dir = RunDir(Path(spec.run_dir), spec.life)
        self._stop = _StopRequest()
        os.set_inheritable(spec.ready_fd, False)  # this process' own children must not keep the pipe open
        answer_with_stacks(self.run_dir.stacks(role))
        arguments = (self.run_dir, self._stop, parent)
        threading.Thread(target=_watch_parent, args=arguments, name="parent watch", daemon=True).start()

    def run(self, role: Callable[..., None], *arguments: Any) -> int:
        """Runs a role. Returns the exit code."""
        try:
            role(*arguments, self.run_dir, self._on_ready, self._stop.is_set)
        except BrokenPipeError:
            return 1  # the parent is gone
        except Exception as error:
            if self._stop.is_ready:
                logger.exception("The process failed")
            else:
                _report_failure(self.spec.ready_fd, error, self.run_dir)
            return 1
        return 0

    def fork(self) -> _Life:
        """Makes this process a fork server. Returns in each forked process, with its own life."""
        assert self.spec.fork_fd is not None
        gc.freeze()  # no collection writes to what the processes share
        write_frame(self.spec.ready_fd, Loaded())
        spec = serve_forks(self.spec.fork_fd)
        os.close(self.spec.ready_fd)  # the end of that pipe is the end of the fork server
        return _Life(self.role, spec, self.parent)

    def _on_ready(self, facts: Ready) -> None:
        gc.freeze()  # later collections skip the loaded objects, too
        gc.enable()
        self._stop.is_ready = True
        write_frame(self.spec.ready_fd, facts)


def _run_model(role: LoadedRole, life: _Life) -> int:
    try:
        loaded = role.load(life.spec.server_args)
    except Exception as error:
        _report_failure(life.spec.ready_fd, error, life.run_dir)
        return 1
    if life.spec.fork_fd is not None and life.parent.outlives_forks and loaded.may_fork:
        try:
            life = life.fork()
            loaded = loaded.with_settings(life.spec.server_args)
        except BrokenPipeError:
            return 1  # the parent is gone
    return life.run(role.run, loaded)


def _report_failure(ready_fd: int, error: Exception, run_dir: RunDir) -> None:
    """Tells the parent why this process cannot start. A defect's traceback goes to the log."""
    user_error = isinstance(error, ValueError | OSError | TercetError)
    # If the run directory is gone, another process of this engine failed first and has reported why.
    expected = user_error or not run_dir.path.exists()
    logger.log(logging.DEBUG if expected else logging.ERROR, "The process failed to start", exc_info=error)
    reason = reason_of(error)
    report: ToParent = StartFailed(reason if user_error else f"{type(error).__name__}: {reason}", user_error)
    write_frame(ready_fd, report)


def _watch_parent(run_dir: RunDir, stop: _StopRequest, parent: _Parent) -> None:
    """Forwards the parent's stop request, and ends this process when the parent dies.

    Both are read from stdin. A fork of the parent may keep that pipe open after the parent's death, so the parent is
    looked at as well, twice a second. If the parent only closes the pipe, it does not need this process, and goes on.
    """
    while not parent.is_gone():
        readable, _, _ = select.select([_STDIN], [], [], _PARENT_POLL_S)
        if not readable:
            continue
        if os.read(_STDIN, len(STOP)) != STOP:
            break
        stop.set()
    deadline = time.monotonic() + _PARENT_END_S
    while not parent.is_gone() and time.monotonic() < deadline:
        time.sleep(0.01)  # a process that ends closes its pipes a moment before
    if parent.is_gone():
        run_dir.remove()
    os._exit(1)  # the main thread may be busy for seconds, in a kernel for example


if __name__ == "__main__":
    sys.exit(main())
