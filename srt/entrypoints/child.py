"""A child process of the engine: `python -m tercet.srt.entrypoints.child ROLE`, started by processes.py.

It reads its launch spec from stdin and reports on the pipe that the spec names. It ignores SIGINT and SIGTERM: the
parent lets running requests finish, and then tells the child to stop. When the parent dies, for any reason, the child
removes the run directory and exits at once, so that nothing of the engine is left behind.
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
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

from .. import log
from ..errors import TercetError
from ..grammar_spec import CheckGrammarReply, CheckGrammarReq
from ..io_struct import ToDetokenizer, ToTokenizer
from ..ipc import Receiver, RunDir, Sender
from ..server_args import ServerArgs
from ..start_reports import DetokenizerReady, GrammarWorkerReady, Ready, StartFailed, ToParent
from .handshake import STOP, LaunchSpec, read_spec, write_frame
from .watchdog import answer_with_stacks

logger = logging.getLogger("tercet.child")  # __name__ is __main__ here

OnReady = Callable[[Ready], None]
ShouldStop = Callable[[], bool]
Run = Callable[..., None]
"""Runs a role until `should_stop()` is true. Calls `on_ready` once, when the role is ready.

Its arguments are ServerArgs, RunDir, OnReady and ShouldStop. An HTTP worker also gets its `listener`.
"""

_STDIN = 0
_PARENT_POLL_S = 0.5
_LOWEST_PRIORITY = 19
_MODULES = {"scheduler": "...managers.scheduler_process"}
"""What a spare process of a role imports."""


def run_scheduler_role(server_args: ServerArgs, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop) -> None:
    # Imported here: only this role needs torch, whose import takes seconds.
    from ...managers.scheduler_process import run_scheduler
    from ..model_files.model_config import load_model_config

    model_config = load_model_config(server_args.model_path, server_args.load_format)
    run_scheduler(server_args, model_config, run_dir, on_ready, should_stop)


def run_detokenizer_role(server_args: ServerArgs, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop) -> None:
    # Imported here: the scheduler process needs neither module.
    from ...managers.detokenizer_manager import run_detokenizer
    from ..text.tokenizer import load_tokenizer

    tokenizer = None
    if not server_args.skip_tokenizer_init:
        tokenizer = load_tokenizer(server_args.model_path, server_args.tokenizer_path)
    context = zmq.Context()
    receiver: Receiver[ToDetokenizer] = Receiver(context, run_dir.detokenizer, ToDetokenizer)
    sender: Sender[ToTokenizer] = Sender(context, run_dir.tokenizer)
    on_ready(DetokenizerReady())
    run_detokenizer(receiver, sender, tokenizer, should_stop)
    receiver.close()
    sender.close()
    context.term()


def run_grammar_role(server_args: ServerArgs, run_dir: RunDir, on_ready: OnReady, should_stop: ShouldStop) -> None:
    # Imported here: the other processes need none of them.
    from ...managers.grammar_backends import make_compiler
    from ...managers.grammar_worker import grammar_vocabulary, limit_resources, run_grammar_worker
    from ..model_files.model_config import load_model_config
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


ROLES: Mapping[str, Run] = {
    "scheduler": run_scheduler_role,
    "detokenizer": run_detokenizer_role,
    "grammar": run_grammar_role,
    "http_worker": run_http_worker_role,
}


def main(roles: Mapping[str, Run] = ROLES) -> int:
    """Runs the child process. Returns the exit code: 0 after a requested stop, 1 after a failure."""
    role = sys.argv[1]
    parent = os.getppid()
    # Imported and loaded objects stay for the life of the process. Collections during start-up would take 0.2 s.
    gc.disable()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the parent decides what they mean
    try:
        if not _has_spec(0):
            _load_modules(role)
        while not _has_spec(_PARENT_POLL_S):
            if os.getppid() != parent:
                return 1
        spec = read_spec(_STDIN)
    except EOFError:
        return 1
    run_dir = RunDir(Path(spec.run_dir), spec.life)
    stop = _StopRequest()
    answer_with_stacks(run_dir.stacks(role))
    threading.Thread(target=_watch_parent, args=(run_dir, stop), name="parent watch", daemon=True).start()
    log.configure(role, spec.server_args.log_level, spec.server_args.log_format)
    try:
        return _run(roles[role], spec, run_dir, stop)
    finally:
        if os.getppid() != parent:  # the parent has died without removing it
            run_dir.remove()


def _has_spec(timeout_s: float) -> bool:
    """Waits until the launch spec, or the end of the parent, can be read from stdin."""
    return bool(select.select([_STDIN], [], [], timeout_s)[0])


def _load_modules(role: str) -> None:
    """Imports what a spare process will need, at the lowest priority: it must not slow the running engine down.

    A process cannot raise its priority again, but on Linux a priority belongs to a thread.
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
    thread.join()


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


def _run(run: Run, spec: LaunchSpec, run_dir: RunDir, stop: _StopRequest) -> int:
    os.set_inheritable(spec.ready_fd, False)  # this process' own children must not keep the pipe open

    def on_ready(facts: Ready) -> None:
        gc.freeze()  # later collections skip the loaded objects, too
        gc.enable()
        stop.is_ready = True
        write_frame(spec.ready_fd, facts)

    try:
        if spec.listener_fd is None:
            run(spec.server_args, run_dir, on_ready, stop.is_set)
        else:
            with socket.socket(fileno=spec.listener_fd) as listener:
                run(spec.server_args, run_dir, on_ready, stop.is_set, listener)
    except BrokenPipeError:
        return 1  # the parent is gone
    except Exception as error:
        if stop.is_ready:
            logger.exception("The process failed")
        else:
            _report_failure(spec.ready_fd, error, run_dir)
        return 1
    return 0


def _report_failure(ready_fd: int, error: Exception, run_dir: RunDir) -> None:
    """Tells the parent why this process cannot start. A defect's traceback goes to the log."""
    user_error = isinstance(error, ValueError | OSError | TercetError)
    # If the run directory is gone, another process of this engine failed first and has reported why.
    expected = user_error or not run_dir.path.exists()
    logger.log(logging.DEBUG if expected else logging.ERROR, "The process failed to start", exc_info=error)
    message = str(error) if user_error else f"{type(error).__name__}: {error}"
    report: ToParent = StartFailed(message or type(error).__name__, user_error)
    write_frame(ready_fd, report)


def _watch_parent(run_dir: RunDir, stop: _StopRequest) -> None:
    """Forwards the parent's stop request, and ends this process when the parent dies.

    Both are read from stdin. A fork of the parent may keep that pipe open after the parent's death, so the parent's
    process id is checked as well, twice a second.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([_STDIN], [], [], _PARENT_POLL_S)
        if not readable:
            continue
        if os.read(_STDIN, len(STOP)) != STOP:
            break
        stop.set()
    run_dir.remove()
    os._exit(1)  # the main thread may be busy for seconds, in a kernel for example


if __name__ == "__main__":
    sys.exit(main())
