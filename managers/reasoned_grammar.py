"""`ReasonedGrammar`: a grammar whose text comes after the model's reasoning.

The reasoning is free text up to a token that ends it. EOS and other special tokens are masked in it, so the text of the
grammar always follows. The reasoning may have a limit: then only the token that ends it may come. The masks of the
reasoning are made once, so they cost nothing.

`AnyGrammar` allows everything. With it, only the limit of the reasoning changes a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..srt.arrays import Int32Array
from ..srt.grammar_spec import ReasoningSpan
from .grammar import Grammar, Matcher, Vocabulary, mask_of, mask_of_all


class AnyGrammar:
    """A grammar (Grammar) and matcher (Matcher) of every output."""

    is_full = False

    def start(self) -> Matcher:
        return self

    def fill(self, bits: Int32Array, line: int) -> None:
        bits[line] = -1

    def accept(self, token: int) -> None:
        pass

    def fork(self) -> Matcher:
        return self


class ReasonedGrammar:
    """A compiled grammar after reasoning (Grammar)."""

    def __init__(self, grammar: Grammar, span: ReasoningSpan, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._span = span
        num_words = vocabulary.num_words
        if isinstance(grammar, AnyGrammar):
            free = np.full(num_words, -1, np.int32)
        else:
            free = vocabulary.text_mask | mask_of_all((*span.starts, *span.ends), num_words)
        self._masks = _Masks(mask_of_all(span.starts, num_words), free, mask_of(span.ends[0], num_words))

    @property
    def is_full(self) -> bool:
        return self._grammar.is_full

    def start(self) -> Matcher:
        span = self._span
        return _Matcher(
            self._grammar.start(),
            span,
            self._masks,
            is_inside=span.inside,
            may_begin=not span.inside,
            num_left=span.max_tokens,
        )


class _Masks(NamedTuple):
    """The masks of the tokens that begin a reasoning, of those inside it, and of the one that must end it."""

    starts: Int32Array
    free: Int32Array
    end: Int32Array


class _Matcher:
    """The state of one output: before its reasoning, inside it or after it. Only the first token can begin it."""

    def __init__(
        self,
        matcher: Matcher,
        span: ReasoningSpan,
        masks: _Masks,
        *,
        is_inside: bool,
        may_begin: bool,
        num_left: int | None,
    ) -> None:
        """`num_left`: how many tokens the reasoning may still have. None: as many as the model wants."""
        self._matcher = matcher
        self._span = span
        self._masks = masks
        self._is_inside = is_inside
        self._may_begin = may_begin
        self._num_left = num_left

    def fill(self, bits: Int32Array, line: int) -> None:
        if self._is_inside:
            bits[line] = self._masks.end if self._num_left == 0 else self._masks.free
            return
        self._matcher.fill(bits, line)
        if self._may_begin:
            bits[line] |= self._masks.starts

    def accept(self, token: int) -> None:
        if self._is_inside:
            self._is_inside = token not in self._span.ends
            if self._num_left is not None:
                self._num_left -= 1
        elif self._may_begin and token in self._span.starts:
            self._is_inside = True
        else:
            self._matcher.accept(token)
        self._may_begin = False

    def fork(self) -> Matcher:
        return _Matcher(
            self._matcher.fork(),
            self._span,
            self._masks,
            is_inside=self._is_inside,
            may_begin=self._may_begin,
            num_left=self._num_left,
        )
