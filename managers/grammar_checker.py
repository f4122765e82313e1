"""Checks the grammars of requests before the scheduler sees them. Runs in the event loop of the TokenizerManager.

Each grammar is compiled once, in a grammar worker, and the result is cached. Grammars are compiled one at a time, in
the order of their first requests. Equal grammars that arrive together wait for one compilation. A request waits here,
outside the scheduler's queue, so its grammar delays no request that has none. A grammar whose clients have all gone
leaves the queue.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol

from ..srt.errors import GrammarNotChecked, InvalidRequest, QueueFull
from ..srt.grammar_spec import GrammarSpec

MAX_VERDICT_BYTES = 16 << 20
"""Size of all cached results, with the descriptions of their grammars."""
MAX_WAITING = 256
"""Grammars that wait for their compilation, with the one that is compiled. Together they have at most 32 MiB."""
_ENTRY_BYTES = 512
"""Size of a cached result without its texts."""


class GrammarWorker(Protocol):
    """Where grammars are compiled: `srt/entrypoints/grammar_process.py`, or a test's fake."""

    async def compile(self, spec: GrammarSpec) -> str | None:
        """Why the grammar cannot be used; None if it can. Called for one grammar at a time.

        If it raises, the grammar could not be checked, and may be valid.
        """


class GrammarChecks(Protocol):
    """The interface for checks of grammars: a GrammarChecker, or a test's fake."""

    async def check(self, spec: GrammarSpec) -> None:
        """Returns if the scheduler can compile the grammar. Raises InvalidRequest."""


async def check_grammar(checks: GrammarChecks | None, grammar: GrammarSpec, param: str) -> None:
    """Returns if the grammar can be used. Otherwise raises as `GrammarChecker.check`, but names `param`.

    `checks`: None refuses every grammar. `param`: the field of the request that has the grammar.
    """
    if checks is None:
        raise InvalidRequest(f"{param} is not supported: this engine has no grammars", param=param)
    try:
        await checks.check(grammar)
    except (InvalidRequest, GrammarNotChecked) as error:
        # Other requests may wait for the same error, so it is copied.
        message = error.message
        if message.startswith(f"{grammar.kind} "):
            message = param + message.removeprefix(grammar.kind)
        raise type(error)(message, param=param if isinstance(error, InvalidRequest) else None) from None


class GrammarChecker:
    """The judge of grammars (GrammarChecks)."""

    def __init__(
        self,
        worker: GrammarWorker,
        *,
        unusable: str | None = None,
        max_bytes: int = MAX_VERDICT_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`unusable`: why this engine can use no grammar at all; None: it can."""
        self._worker = worker
        self._unusable = unusable
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._verdicts: OrderedDict[GrammarSpec, str | None] = OrderedDict()
        self._num_bytes = 0
        self._compilations: dict[GrammarSpec, _Compilation] = {}
        """Oldest first. Only the first one may have begun."""
        self._working: asyncio.Task[None] | None = None

    async def check(self, spec: GrammarSpec) -> None:
        """Returns if the scheduler can compile the grammar.

        Raises InvalidRequest, QueueFull if too many other grammars wait, and what the worker raises.
        """
        if self._unusable is not None:
            raise InvalidRequest(self._unusable, param=spec.kind)
        if spec in self._verdicts:
            self._verdicts.move_to_end(spec)
            verdict = self._verdicts[spec]
        else:
            verdict = await self._wait_for(spec)
        if verdict is not None:
            raise InvalidRequest(verdict, param=spec.kind)

    async def _wait_for(self, spec: GrammarSpec) -> str | None:
        compilation = self._compilations.get(spec)
        if compilation is None:
            if len(self._compilations) >= self._max_waiting:
                raise QueueFull(f"{self._max_waiting} grammars wait for their compilation; try again later")
            compilation = self._compilations[spec] = _Compilation()
            if self._working is None or self._working.done():
                self._working = asyncio.create_task(self._work())
        compilation.num_requests += 1
        try:
            # A client that goes away must not cancel what others wait for.
            return await asyncio.shield(compilation.verdict)
        finally:
            compilation.num_requests -= 1
            if not compilation.num_requests and not compilation.has_begun:
                del self._compilations[spec]

    async def _work(self) -> None:
        """Compiles until no grammar waits."""
        while self._compilations:
            spec, compilation = next(iter(self._compilations.items()))
            compilation.has_begun = True
            try:
                verdict = await self._worker.compile(spec)
            except Exception as error:
                compilation.verdict.set_exception(error)
                compilation.verdict.exception()  # marks it as retrieved: all clients may have gone
            else:
                compilation.verdict.set_result(verdict)
                self._keep(spec, verdict)
            finally:
                del self._compilations[spec]

    def _keep(self, spec: GrammarSpec, verdict: str | None) -> None:
        self._verdicts[spec] = verdict
        self._num_bytes += _size(spec, verdict)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._verdicts.popitem(last=False))


class _Compilation:
    """A compilation that waits or runs, and the number of requests that wait for it."""

    def __init__(self) -> None:
        self.verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.num_requests = 0
        self.has_begun = False


def _size(spec: GrammarSpec, verdict: str | None) -> int:
    return _ENTRY_BYTES + len(spec.text) + len(verdict or "")
