"""A running engine in one event loop: the two child processes, the sockets to them, and the TokenizerManager.

The HTTP server runs an EngineCore in its own event loop, and `tercet.Engine` in the event loop of a private thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from ...managers.tokenizer_manager import TokenizerManager
from ..io_struct import SchedulerReady, ToScheduler, ToTokenizer
from ..ipc import AsyncReceiver, RunDir, Sender
from ..model_files.model_config import load_model_config
from ..server_args import ServerArgs
from ..text.tokenizer import Tokenizer, load_tokenizer
from .processes import CHILD_MODULE, ChildProcess, stop_children

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineCore:
    """A running engine. It belongs to the event loop in which it was started; call its methods only from there."""

    def __init__(
        self,
        tokenizer_manager: TokenizerManager,
        children: list[ChildProcess],
        run_dir: RunDir,
        context: zmq.Context[Any],
        sender: Sender[ToScheduler],
        receiver: AsyncReceiver[ToTokenizer],
    ) -> None:
        self.tokenizer_manager = tokenizer_manager
        self.child_pids = {child.role: child.pid for child in children}
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when a child process has died unexpectedly. The result says how it died. By then, every waiting client
        has its error."""
        self._children = children
        self._run_dir = run_dir
        self._context = context
        self._sender = sender
        self._receiver = receiver
        self._stopping = False
        for child in children:
            child.ended.add_done_callback(self._on_child_ended)

    @classmethod
    async def start(cls, server_args: ServerArgs, *, child_module: str = CHILD_MODULE) -> EngineCore:
        """Starts the processes and waits until they are ready. Leaves nothing behind when it fails or is cancelled.

        Raises ValueError or OSError for a mistake of the user (the message says what to change), EngineDead when a
        process fails. `child_module`: the module that a child process runs; tests replace it.
        """
        model_config = load_model_config(server_args.model_path, server_args.load_format)
        server_args = server_args.with_seed()  # before the children start, so that all processes use the same seed
        run_dir = RunDir.create()
        context: zmq.Context[Any] = zmq.Context()
        children: list[ChildProcess] = []
        try:
            for role in ("scheduler", "detokenizer"):
                children.append(ChildProcess(role, server_args, run_dir, child_module))
            facts, _, tokenizer = await asyncio.gather(
                children[0].ready, children[1].ready, _in_daemon_thread(lambda: _load_tokenizer(server_args))
            )
            assert isinstance(facts, SchedulerReady)
            logger.info("The random seed is %d", server_args.random_seed)
            sender: Sender[ToScheduler] = Sender(context, run_dir.scheduler)
            manager = TokenizerManager(server_args, model_config, tokenizer, facts, sender)
            receiver: AsyncReceiver[ToTokenizer] = AsyncReceiver(
                context, run_dir.tokenizer, ToTokenizer, manager.on_message
            )
            receiver.start(asyncio.get_running_loop())
        except BaseException:
            await stop_children(children)
            context.destroy(linger=0)
            run_dir.remove()
            raise
        return cls(manager, children, run_dir, context, sender, receiver)

    async def stop(self) -> None:
        """Ends all requests with an error, stops the processes, and removes the sockets. A second call does nothing."""
        if self._stopping:
            return
        self._stopping = True
        self.tokenizer_manager.fail("the engine was shut down")
        await stop_children(self._children)
        self._receiver.close()
        self._sender.close()
        self._context.destroy(linger=0)
        self._run_dir.remove()

    def _on_child_ended(self, ended: asyncio.Future[str]) -> None:
        if self._stopping or self.died.done():
            return
        logger.error("The engine has failed: %s", ended.result())
        self.tokenizer_manager.fail(ended.result())
        self.died.set_result(ended.result())


def _load_tokenizer(server_args: ServerArgs) -> Tokenizer | None:
    if server_args.skip_tokenizer_init:
        return None
    return load_tokenizer(server_args.model_path, server_args.tokenizer_path, server_args.chat_template)


def _in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Like `asyncio.to_thread`, but exit does not wait for the thread, so Ctrl-C during start-up works at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, result, failure)
        except RuntimeError:
            return  # the loop is closed, so nothing waits for the result

    threading.Thread(target=run, daemon=True).start()
    return future
