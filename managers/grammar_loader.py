"""Gives requests their grammars, in the scheduler: from a cache, or compiled in a thread while the request waits.

A request that waits for its grammar is in the waiting queue, and admission passes over it. A grammar worker has
compiled the same description before (grammar_checker.py), so no compilation here is endless or crashes. The libraries
release the GIL while they compile.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable

from ..srt.errors import GrammarNotChecked, TercetError
from ..srt.grammar_spec import ANYTHING, GrammarSpec
from .grammar import Grammar, GrammarCompiler, GrammarFailed, GrammarState, Vocabulary, compile_and_check, invalid
from .reasoned_grammar import AnyGrammar, ReasonedGrammar
from .req import Req

logger = logging.getLogger(__name__)

MAX_CACHED = 64
"""Compiled grammars that are kept. One takes some hundred kilobytes."""
_STACK_BYTES = 64 << 20
"""A grammar that nests deeply takes a deep stack. The worker that has checked it had half of this."""
_WAIT_S = 0.001


class GrammarLoader:
    """The grammars of one scheduler."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        make_compiler: Callable[[Vocabulary], GrammarCompiler],
        *,
        in_thread: bool,
        max_cached: int = MAX_CACHED,
    ) -> None:
        """Both functions are called once, for the first grammar. `in_thread` False: compile in the caller's thread."""
        self._make_vocabulary = make_vocabulary
        self._make_compiler = make_compiler
        self._in_thread = in_thread
        self._max_cached = max_cached
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._cached: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._waiting: dict[GrammarSpec, list[Req]] = {}
        self._jobs: queue.SimpleQueue[GrammarSpec] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[GrammarSpec, Grammar | TercetError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def num_words(self) -> int:
        """The words of a mask. Some request must have a grammar."""
        assert self._vocabulary is not None
        return self._vocabulary.num_words

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._waiting)

    def load(self, spec: GrammarSpec) -> Grammar:
        """The grammar, compiled now unless it is cached. Raises InvalidRequest or GrammarNotChecked."""
        grammar = self._find(spec)
        if grammar is None:
            result = self._compile(spec)
            if isinstance(result, TercetError):
                raise result
            grammar = self._keep(spec, result)
        return grammar

    def attach(self, req: Req, spec: GrammarSpec) -> None:
        """Give a new request its grammar, now or in a later `collect`. Raises as `load` if that is known by now."""
        if not self._in_thread:
            self._give(req, spec, self.load(spec))
            return
        grammar = self._find(spec)
        if grammar is not None:
            self._give(req, spec, grammar)
            return
        req.awaits_grammar = True
        if spec not in self._waiting:
            self._waiting[spec] = []
            self._start_thread()
            self._jobs.put(spec)
        self._waiting[spec].append(req)

    def collect(self, *, may_wait: bool) -> list[tuple[Req, TercetError]]:
        """Give compiled grammars to the requests that wait for them. Returns the requests without one, and why.

        `may_wait`: nothing else is to be done, so wait for a millisecond.
        """
        failed = []
        while self._waiting:
            try:
                spec, result = self._results.get(may_wait, _WAIT_S)
            except queue.Empty:
                break
            for req in self._waiting.pop(spec):
                req.awaits_grammar = False
                try:
                    if isinstance(result, TercetError):
                        raise result
                    self._give(req, spec, self._keep(spec, result))
                except TercetError as error:
                    failed.append((req, error))
        return failed

    def _give(self, req: Req, spec: GrammarSpec, grammar: Grammar) -> None:
        assert self._vocabulary is not None
        if req.options.reasoning is not None:
            grammar = ReasonedGrammar(grammar, req.options.reasoning, self._vocabulary)
        try:
            req.grammar = GrammarState(grammar, self._vocabulary.eos_ids, req.sampling, self.num_words)
            for token in req.output_ids:  # of a request of an engine that has died
                req.grammar.accept(token)
        except GrammarFailed as error:
            raise invalid(spec, str(error)) from None

    def _find(self, spec: GrammarSpec) -> Grammar | None:
        grammar = self._cached.get(spec)
        if grammar is None:
            return None
        if grammar.is_full:
            del self._cached[spec]
            return None
        self._cached.move_to_end(spec)
        return grammar

    def _keep(self, spec: GrammarSpec, grammar: Grammar) -> Grammar:
        self._cached[spec] = grammar
        if len(self._cached) > self._max_cached:
            self._cached.popitem(last=False)
        return grammar

    def _start_thread(self) -> None:
        if self._thread is None:
            before = threading.stack_size(_STACK_BYTES)
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)

    def _run(self) -> None:
        while True:
            spec = self._jobs.get()
            self._results.put((spec, self._compile(spec)))

    def _compile(self, spec: GrammarSpec) -> Grammar | TercetError:
        try:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            if spec == ANYTHING:
                return AnyGrammar()
            if self._compiler is None:
                self._compiler = self._make_compiler(self._vocabulary)
            return compile_and_check(self._compiler, spec, self.num_words)
        except TercetError as error:
            return error
        except MemoryError:  # the worker has compiled it, within its own memory
            return GrammarNotChecked(f"{spec.kind} could not be compiled: there is too little memory")
        except Exception:  # not the client's mistake either: the worker has compiled it
            logger.exception("Could not compile a grammar (%s)", spec.kind)
            return GrammarNotChecked(f"{spec.kind} could not be compiled; the server's log has the details")
