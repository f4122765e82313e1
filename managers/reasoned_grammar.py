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

    def start(self) -> Matcher:
        return _Matcher(self._grammar.start(), self._span, self._starts, self._free)


class _Matcher:
    """The state of one output: before its reasoning, inside it or after it. Only the first token can begin it."""

    def __init__(self, matcher: Matcher, span: ReasoningSpan, starts: Int32Array, free: Int32Array) -> None:
        self._matcher = matcher
        self._span = span
        self._starts = starts
        self._free = free
        self._num_thoughts = 0
        """Tokens of the reasoning so far, with its marks."""
        self._num_texts = 0
        """Tokens of the grammar's text so far."""
        self._is_inside = span.inside

    def fill(self, bits: Int32Array, line: int) -> None:
        if self._is_inside:
            bits[line] = self._free
            return
        self._matcher.fill(bits, line)
        if self._may_begin:
            bits[line] |= self._starts

    def accept(self, token: int) -> None:
        if self._is_inside:
            self._num_thoughts += 1
            self._is_inside = token not in self._span.ends
        elif self._may_begin and token in self._span.starts:
            self._num_thoughts = 1
            self._is_inside = True
        else:
            self._matcher.accept(token)
            self._num_texts += 1

    def rollback(self, num_tokens: int) -> None:
        num_texts = min(num_tokens, self._num_texts)
        if num_texts:
            self._matcher.rollback(num_texts)
            self._num_texts -= num_texts
        num_thoughts = num_tokens - num_texts
        if num_thoughts:
            self._num_thoughts -= num_thoughts
            self._is_inside = self._span.inside or self._num_thoughts > 0

    @property
    def _may_begin(self) -> bool:
        """Called only outside of the reasoning."""
        return not self._num_thoughts and not self._num_texts
