"""Runs the programs of an interpreted launch at the same time, as a GPU may: before any access to memory, another one
may go on. Triton's interpreter runs one program after the other.

Each program has a thread, but only one runs at any time. A seed decides which.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
_BURSTS = ((1,), (1, 2, 5, 1000))
"""Numbers of accesses until another program goes on, for even seeds and for odd ones. With ones, programs reach the
same line at about the same time. With a large one, a program ends while others are within a line."""


class _LaunchEndedError(BaseException):
    """Another program has failed."""


class _Program(threading.Thread):
    """A program that runs only within `advance`, from one access to the next."""

    def __init__(self, work: Callable[[], object], enter: Callable[[_Program], None]) -> None:
        """`enter`: is called in the thread before the program begins or goes on."""
        super().__init__(daemon=True)
        self._work = work
        self._enter = enter
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._cancelled = False
        self._error: Exception | None = None
        self.has_ended = False
        self.start()

    def run(self) -> None:
        try:
            self._wait()
            self._work()
        except _LaunchEndedError:
            pass
        except Exception as error:
            self._error = error
        self.has_ended = True
        self._paused.release()

    def _wait(self) -> None:
        self._go.acquire()
        if self._cancelled:
            raise _LaunchEndedError
        self._enter(self)

    def pause(self) -> None:
        """Called by the program itself."""
        self._paused.release()
        self._wait()

    def advance(self) -> None:
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._cancelled = True
        self._go.release()
        self.join()


class _Launch:
    """Takes the place of a kernel's function. It collects the calls, one for each program, and runs them together."""

    def __init__(
        self, fn: Callable[..., object], builder: Any, rng: np.random.Generator, bursts: tuple[int, ...]
    ) -> None:
        self._fn, self._builder, self._rng, self._bursts = fn, builder, rng, bursts
        self._calls: list[tuple[tuple[int, int, int], dict[str, Any]]] = []
        # What the interpreter asks of a function.
        self.__name__, self.__globals__ = fn.__name__, fn.__globals__
        self.__signature__ = inspect.signature(fn)

    def __call__(self, **arguments: Any) -> None:
        self._calls.append((self._builder.grid_idx, arguments))
        if len(self._calls) == math.prod(self._builder.grid_dim):
            self._run()

    def _run(self) -> None:
        programs = [self._program(*call) for call in self._calls]
        try:
            while programs:
                program = programs[self._rng.integers(len(programs))]
                for _ in range(self._rng.choice(self._bursts)):
                    program.advance()
                    if program.has_ended:
                        programs.remove(program)
                        break
        finally:
            for program in programs:
                program.cancel()

    def _program(self, index: tuple[int, int, int], arguments: dict[str, Any]) -> _Program:
        def enter(program: _Program) -> None:
            self._builder.grid_idx = index
            _running.program = program

        return _Program(lambda: self._fn(**arguments), enter)


_running = threading.local()
"""`program`: the one of this thread."""


@contextmanager
def interleaved_programs(seed: int) -> Iterator[None]:
    """A context in which the programs of a launch run at the same time."""
    from triton.runtime import interpreter  # only here: processes that compile kernels never import it

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    accesses = {name: getattr(builder, name) for name in _ACCESSES}
    in_turn = executor.__call__
    rng = np.random.default_rng(seed)

    def pausing(access: Callable[..., object]) -> Callable[..., object]:
        def paused(self: Any, *args: Any, **kwargs: Any) -> object:
            _running.program.pause()
            return access(self, *args, **kwargs)

        return paused

    def together(self: Any, *args: Any, **kwargs: Any) -> None:
        self.fn = _Launch(self.fn, interpreter.interpreter_builder, rng, _BURSTS[seed % 2])
        in_turn(self, *args, **kwargs)

    for name, access in accesses.items():
        setattr(builder, name, pausing(access))
    executor.__call__ = together
    try:
        yield
    finally:
        executor.__call__ = in_turn
        for name, access in accesses.items():
            setattr(builder, name, access)
