"""The grammar worker: a process that compiles the grammars of clients, so that a grammar cannot harm another process.

It reports whether a grammar can be compiled, and keeps nothing. A grammar that takes too much memory or crashes a
library ends the worker. If a grammar takes too long, the parent ends the worker (`GrammarProcess`). Then only that
request fails, and the parent starts another worker.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ..srt.errors import TercetError
from ..srt.grammar_spec import CheckGrammarReply, CheckGrammarReq
from ..srt.io_struct import BrokenMessage
from ..srt.model_files.model_config import ModelConfig
from ..srt.text.tokenizer import Tokenizer
from .grammar import GrammarCompiler, Vocabulary, compile_and_check, vocabulary_of
from .scheduler_io import Outbox

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_MEMORY_BYTES = 1 << 30
"""Address space that compilations may take."""
_STACK_BYTES = 32 << 20
_NICENESS = 10


class GrammarInbox(Protocol):
    """`ipc.Receiver`, or a test's list."""

    def drain(self) -> Sequence[CheckGrammarReq | BrokenMessage]: ...

    def wait(self, timeout_s: float) -> bool: ...


def eos_ids_of(tokenizer: Tokenizer | None, model_config: ModelConfig) -> frozenset[int]:
    """The tokens that end an output, as the model and its tokenizer name them."""
    return frozenset(model_config.eos_token_ids) | (tokenizer.eos_token_ids if tokenizer else frozenset())


def grammar_vocabulary(tokenizer: Tokenizer | None, model_config: ModelConfig) -> Vocabulary:
    """The vocabulary of a model for grammars. Raises InvalidRequest if the model cannot have grammars."""
    assert tokenizer is not None, "the TokenizerManager refuses grammars without a tokenizer"
    return vocabulary_of(tokenizer, model_config.vocab_size, eos_ids_of(tokenizer, model_config))


def limit_resources() -> None:
    """Limit the address space of this process to its present size plus _MEMORY_BYTES, and lower its priority.

    Call it when everything is loaded. A crash writes no core file.
    """
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, hard))


def run_grammar_worker(
    inbox: GrammarInbox,
    outbox: Outbox[CheckGrammarReply],
    compiler: GrammarCompiler,
    num_words: int,
    should_stop: Callable[[], bool],
) -> None:
    """Answer requests until `should_stop()`."""

    def loop() -> None:
        while not should_stop():
            inbox.wait(_POLL_S)
            for message in inbox.drain():
                if isinstance(message, CheckGrammarReq):
                    outbox.send(CheckGrammarReply(message.call_id, _verdict(compiler, message, num_words)))

    # A thread of its own, because only a new thread can have a stack of a given size.
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=loop, name="grammars")
    thread.start()
    thread.join()


def _verdict(compiler: GrammarCompiler, message: CheckGrammarReq, num_words: int) -> str | None:
    """Why a grammar cannot be used; None if it can."""
    try:
        compile_and_check(compiler, message.spec, num_words)
    except TercetError as error:
        return error.message
    except MemoryError:
        return f"{message.spec.kind} cannot be used: it takes too much memory"
    except Exception:
        logger.exception("Could not compile a grammar (%s)", message.spec.kind)
        return f"{message.spec.kind} cannot be used: its compilation failed"
    return None
