"""A private thread that runs an EngineCore in its own event loop.

So an Engine may be used from any thread, from inside a running event loop, and in a notebook.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from ..errors import EngineDead
from ..machine.standard_files import open_standard_files
from ..server_args import ServerArgs
from .engine_core import EngineCore

T = TypeVar("T")

_SHUT_DOWN = "the engine was shut down"
_PENDING_TASKS_TIMEOUT_S = 1.0


class EngineThread:
    """The thread of one engine. The constructor starts the engine and raises what `EngineCore.start` raises."""

    def __init__(self, server_args: ServerArgs, child_module: str) -> None:
        open_standard_files()
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._owner_pid = os.getpid()
        self._started: concurrent.futures.Future[EngineCore] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(server_args, child_module), name="tercet engine", daemon=True
        )
        self._thread.start()
        try:
            self.core = self._started.result()
        except BaseException:  # Ctrl-C, too, must leave no process behind
            self.stop()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine in the engine's loop. Cancelling the future cancels it. Raises EngineDead after `stop`."""
        try:
            if os.getpid() != self._owner_pid:
                raise EngineDead("the engine belongs to the parent process; a forked process cannot use it")
            if self._stop.is_set():
                raise EngineDead(_SHUT_DOWN)
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop has just been closed
            work.close()
            raise EngineDead(_SHUT_DOWN) from None
        except EngineDead:
            work.close()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the engine's loop and returns its result. Ctrl-C during the wait cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise EngineDead(_SHUT_DOWN) from None
        except BaseException:
            future.cancel()
            raise

    async def wait_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `wait`, for a caller in another event loop. Cancelling the caller cancels the work."""
        caller = asyncio.current_task()
        assert caller is not None
        try:
            return await asyncio.wrap_future(self.submit(work))
        except asyncio.CancelledError:
            if caller.cancelling():
                raise
            raise EngineDead(_SHUT_DOWN) from None  # the engine cancelled the work, not the caller

    def stop(self) -> None:
        """Stops the engine and its processes, and waits until they have ended. A second call does nothing."""
        if os.getpid() != self._owner_pid:
            return  # a fork has a copy of this object, but neither the thread nor the children
        with contextlib.suppress(RuntimeError):  # the loop is closed, so the engine has ended already
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # this thread may itself garbage-collect an Engine
            self._thread.join()

    def _run(self, server_args: ServerArgs, child_module: str) -> None:
        try:
            self._loop.run_until_complete(self._run_engine(server_args, child_module))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _run_engine(self, server_args: ServerArgs, child_module: str) -> None:
        starting = asyncio.create_task(EngineCore.start(server_args, child_module=child_module))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()  # no effect on a finished task
        try:
            core = await starting
        except BaseException as error:  # the constructor waits for the result, and must get any error
            stopping.cancel()
            await asyncio.wait([stopping])
            self._started.set_exception(error)
            return
        self._started.set_result(core)
        await stopping
        await core.stop()
        # All requests have failed now. Their tasks get a moment to deliver the errors before the loop ends.
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        if pending:
            _, late = await asyncio.wait(pending, timeout=_PENDING_TASKS_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
