"""Checks the grammars of requests before the scheduler sees them. Lives in the event loop of the TokenizerManager.

Each grammar is compiled once, in a grammar worker, and its verdict is kept. Equal grammars that arrive together wait
for one compilation. A request waits here, outside the scheduler's queue, so its grammar delays no other request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

from ..srt.errors import InvalidRequest
from ..srt.grammar_spec import GrammarSpec

logger = logging.getLogger(__name__)

MAX_VERDICT_BYTES = 16 << 20
"""Size of the descriptions whose verdicts are kept."""


class GrammarWorker(Protocol):
    """Where grammars are compiled: `srt/entrypoints/grammar_process.py`, or a test's fake."""

    async def compile(self, spec: GrammarSpec) -> str | None:
        """Why the grammar cannot be used; None if it can. Raises nothing that depends on the grammar."""


class GrammarChecks(Protocol):
    """The judge of grammars: a GrammarChecker, or a test's fake."""

    async def check(self, spec: GrammarSpec) -> None:
        """Returns if the scheduler can compile the grammar. Raises InvalidRequest."""


async def check_grammar(checks: GrammarChecks | None, grammar: GrammarSpec, param: str) -> None:
    """Returns if the grammar can be used. Raises InvalidRequest, which names `param`.

    `checks`: None refuses every grammar.
    """
    if checks is None:
        raise InvalidRequest(f"{param} is not supported: this engine has no grammars", param=param)
    try:
        await checks.check(grammar)
    except InvalidRequest as error:
        # Other requests may wait for the same error, so it is copied.
        raise type(error)(error.message, param=param) from None


class GrammarChecker:
    """The judge of grammars (GrammarChecks)."""

    def __init__(
        self, worker: GrammarWorker, *, unusable: str | None = None, max_bytes: int = MAX_VERDICT_BYTES
    ) -> None:
        """`unusable`: why this engine can use no grammar at all; None: it can."""
        self._worker = worker
        self._unusable = unusable
        self._max_bytes = max_bytes
        self._verdicts: OrderedDict[GrammarSpec, str | None] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[GrammarSpec, asyncio.Task[str | None]] = {}

    async def check(self, spec: GrammarSpec) -> None:
        """Returns if the scheduler can compile the grammar. Raises InvalidRequest."""
        if self._unusable is not None:
            raise InvalidRequest(self._unusable, param=spec.kind)
        if spec in self._verdicts:
            self._verdicts.move_to_end(spec)
            verdict = self._verdicts[spec]
        else:
            task = self._running.get(spec)
            if task is None:
                task = self._running[spec] = asyncio.create_task(self._compile(spec))
            # A client that goes away must not cancel the compilation that others wait for.
            verdict = await asyncio.shield(task)
        if verdict is not None:
            raise InvalidRequest(verdict, param=spec.kind)

    async def _compile(self, spec: GrammarSpec) -> str | None:
        try:
            verdict = await self._worker.compile(spec)
        finally:
            del self._running[spec]
        self._verdicts[spec] = verdict
        self._num_bytes += len(spec.text)
        while self._num_bytes > self._max_bytes:
            oldest, _ = self._verdicts.popitem(last=False)
            self._num_bytes -= len(oldest.text)
        return verdict
