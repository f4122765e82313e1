"""`ReasonedGrammar`: a grammar whose text comes after the model's reasoning.

The reasoning is free text up to a token that ends it. EOS and other special tokens are masked in it, so the text of the
grammar always follows. All masks of the reasoning are one array, so they cost nothing.
"""

from __future__ import annotations

from ..srt.arrays import Int32Array
from ..srt.grammar_spec import ReasoningSpan
from .grammar import Grammar, Matcher, Vocabulary, mask_of_all


class ReasonedGrammar:
    """A compiled grammar after reasoning (Grammar)."""

    def __init__(self, grammar: Grammar, span: ReasoningSpan, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._span = span
        self._starts = mask_of_all(span.starts, vocabulary.num_words)
        self._free = vocabulary.text_mask | mask_of_all((*span.starts, *span.ends), vocabulary.num_words)

    @property
    def is_full(self) -> bool:
        return self._grammar.is_full

    def start(self) -> Matcher:
        inside = self._span.inside
        return _Matcher(
            self._grammar.start(), self._span, self._starts, self._free, is_inside=inside, may_begin=not inside
        )


class _Matcher:
    """The state of one output: before its reasoning, inside it or after it. Only the first token can begin it."""

    def __init__(
        self,
        matcher: Matcher,
        span: ReasoningSpan,
        starts: Int32Array,
        free: Int32Array,
        *,
        is_inside: bool,
        may_begin: bool,
    ) -> None:
        """`starts`, `free`: the masks of the tokens that begin a reasoning, and of those inside it."""
        self._matcher = matcher
        self._span = span
        self._starts = starts
        self._free = free
        self._is_inside = is_inside
        self._may_begin = may_begin

    def fill(self, bits: Int32Array, line: int) -> None:
        if self._is_inside:
            bits[line] = self._free
            return
        self._matcher.fill(bits, line)
        if self._may_begin:
            bits[line] |= self._starts

    def accept(self, token: int) -> None:
        if self._is_inside:
            self._is_inside = token not in self._span.ends
        elif self._may_begin and token in self._span.starts:
            self._is_inside = True
        else:
            self._matcher.accept(token)
        self._may_begin = False

    def fork(self) -> Matcher:
        return _Matcher(
            self._matcher.fork(),
            self._span,
            self._starts,
            self._free,
            is_inside=self._is_inside,
            may_begin=self._may_begin,
        )
