"""A fake grammar library: the tokens that may come next are a hash of all tokens before, so a lost token is noticed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from patience import PATIENCE_S

from fakes import choose, next_token, next_tokens
from tercet.managers.grammar import GrammarFailed, Vocabulary
from tercet.model_executor.step import num_mask_words
from tercet.srt.errors import InvalidRequest
from tercet.srt.grammar_spec import GrammarSpec, ReasoningSpan

_KEPT_OF_8 = 3
_ENDS_OF_8 = 1
_FORCES_OF_8 = 5


def hashed_vocabulary(vocab_size: int, eos_ids: frozenset[int]) -> Vocabulary:
    tokens = [bytes([i % 256]) for i in range(vocab_size)]
    return Vocabulary(tokens, eos_ids, eos_ids, {}, lambda text: [*text.encode()])


def allowed_after(output: Sequence[int], seed: int, vocab_size: int, eos_ids: frozenset[int]) -> np.ndarray:
    """bool [vocab_size]: the tokens that the grammar `seed` allows after an output."""
    ids = [seed, *output]
    allowed = next_tokens(ids, vocab_size, 8) < _KEPT_OF_8
    # One hash for both: those of two seeds agree too often.
    ends, forces = divmod(next_token(ids, 1, 64), 8)
    for token in eos_ids:
        allowed[token] = ends < _ENDS_OF_8
    if forces < _FORCES_OF_8 and allowed.any():
        allowed &= np.arange(vocab_size) == np.flatnonzero(allowed)[-1]
    if not allowed.any():
        allowed[list(eos_ids or {0})] = True
    return allowed


def constrained_output(
    prompt: Sequence[int],
    seed: int,
    max_new_tokens: int,
    vocab_size: int,
    *,
    grammar: int | None,
    eos_ids: frozenset[int],
    stop_ids: frozenset[int] = frozenset(),
    min_new_tokens: int = 0,
    ignore_eos: bool = False,
    reasoning: ReasoningSpan | None = None,
) -> list[int]:
    """The output that a request with the grammar must get with any schedule. None: it may be anything."""
    output: list[int] = []
    while len(output) < max_new_tokens:
        thoughts = 0 if reasoning is None else num_thoughts(output, reasoning)
        allowed = np.ones(vocab_size, bool)
        if grammar is not None:
            allowed = allowed_after(output[thoughts or 0 :], grammar, vocab_size, eos_ids)
        if thoughts is None:
            assert reasoning is not None
            allowed = np.array([grammar is None or token not in eos_ids for token in range(vocab_size)])
            if len(output) - (not reasoning.inside) == reasoning.max_tokens:
                allowed = np.arange(vocab_size) == reasoning.ends[0]
        elif reasoning is not None and not output and not reasoning.inside:
            allowed[list(reasoning.starts)] = True
        bars = [(min_new_tokens, eos_ids | stop_ids), (max_new_tokens if ignore_eos else 0, eos_ids)]
        for until, barred in bars:
            kept = allowed.copy()
            kept[list(barred)] = False
            if len(output) < until and kept.any():
                allowed = kept
        output.append(choose(next_token([*prompt, *output], seed, vocab_size), allowed))
        if output[-1] in eos_ids | stop_ids:
            break
    return output


def num_thoughts(output: Sequence[int], reasoning: ReasoningSpan) -> int | None:
    """The length of the reasoning, with its marks, at the start of an output. None: it has not ended."""
    if not reasoning.inside and (not output or output[0] not in reasoning.starts):
        return 0
    first = 0 if reasoning.inside else 1
    return next((i + 1 for i in range(first, len(output)) if output[i] in reasoning.ends), None)


class HashGrammars:
    """A GrammarCompiler. A regex with the text N is the grammar with the seed N; `bad` is invalid, `fails N` fails
    after N tokens, and `breaks N` raises then what no library should."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[GrammarSpec] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def compile(self, spec: GrammarSpec) -> HashGrammar:
        assert self.may_go.wait(PATIENCE_S)
        self.compiled.append(spec)
        if spec.text == "bad":
            raise InvalidRequest("the grammar is bad", param=spec.kind)
        return HashGrammar(spec.text, self.vocabulary)


class HashGrammar:
    is_full = False

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.seed = int(text.split()[-1])
        self.fails_at = self.seed if text.startswith("fails") else None
        self.breaks_at = self.seed if text.startswith("breaks") else None
        self.vocabulary = vocabulary

    def start(self) -> HashMatcher:
        return HashMatcher(self)


class HashMatcher:
    def __init__(self, grammar: HashGrammar, output: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._output = list(output)

    def fill(self, bits: np.ndarray, line: int) -> None:
        vocabulary = self._grammar.vocabulary
        if self._grammar.fails_at == len(self._output):
            raise GrammarFailed("it fails on purpose")
        if self._grammar.breaks_at == len(self._output):
            raise RuntimeError("it breaks on purpose")
        allowed = allowed_after(self._output, self._grammar.seed, len(vocabulary.tokens), vocabulary.eos_ids)
        padded = np.zeros(num_mask_words(len(allowed)) * 32, np.uint8)
        padded[: len(allowed)] = allowed
        bits[line] = np.packbits(padded, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        vocabulary = self._grammar.vocabulary
        assert allowed_after(self._output, self._grammar.seed, len(vocabulary.tokens), vocabulary.eos_ids)[token]
        self._output.append(token)

    def fork(self) -> HashMatcher:
        return HashMatcher(self._grammar, self._output)
