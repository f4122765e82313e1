"""Grammars: the interface between the scheduler and the libraries that compute which tokens may come next.

    GrammarSpec --GrammarCompiler.compile--> Grammar --start--> Matcher (one for each request)

A matcher follows one output. `fill` writes the tokens that may come next as bits, and `accept` takes the token that was
chosen. This module imports no library; grammar_backends.py does.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from ..model_executor.step import num_mask_words
from ..srt.arrays import Int32Array
from ..srt.errors import InvalidRequest
from ..srt.grammar_spec import GrammarSpec
from ..srt.sampling_params import SamplingParams
from ..srt.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
NUM_BITS = 32
"""Tokens in one word of a mask. Bit i of word w is token 32 * w + i."""
_FOREVER = 1 << 30
_SHOWN_CHARS = 300
_SPARE_S = 1.0
_EARNED_S = 0.005
"""The time of a matcher: so much at first and at most, and so much more for each token. All requests wait while it
computes. A mask usually takes less than 0.2 ms. With an ambiguous grammar it takes longer with each token, up to a
second."""


class GrammarFailed(Exception):
    """A matcher cannot continue: a limit was reached, or no token may come next. The message is for the client."""


class Matcher(Protocol):
    """The state of one output."""

    def fill(self, bits: Int32Array, line: int) -> None:
        """Write the mask of the next token to `bits[line]`. An EOS token is allowed where the output may end.

        `bits`: int32 [n, num_words], contiguous. Raises GrammarFailed.
        """

    def accept(self, token: int) -> None:
        """Take the next token, which the last mask allows and which is not EOS. Raises GrammarFailed."""

    def fork(self) -> Matcher:
        """A copy in the same state. Neither changes the other."""


class Grammar(Protocol):
    """A compiled grammar. Requests share it."""

    @property
    def is_full(self) -> bool:
        """Whether requests have used up limits of the library that they share. The next request compiles it again."""

    def start(self) -> Matcher:
        """A matcher at the start of the output."""


class GrammarCompiler(Protocol):
    """Compiles grammars for one vocabulary. Any thread may call it, but only one at a time."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises InvalidRequest, with the spec's kind as `param`."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as grammars see them."""

    tokens: list[bytes]
    """[vocab_size]; empty for an id without text."""
    special_ids: frozenset[int]
    """Tokens that are never part of a text."""
    eos_ids: frozenset[int]
    special_texts: dict[str, int]
    """The special tokens by their names, without EOS."""
    encode: Callable[[str], list[int]]
    """The tokens of a text, without special tokens around it."""

    @property
    def num_words(self) -> int:
        """The words of a mask."""
        return num_mask_words(len(self.tokens))

    @functools.cached_property
    def text_mask(self) -> Int32Array:
        """The mask of all tokens that are text."""
        texts = [token for token, text in enumerate(self.tokens) if text and token not in self.special_ids]
        return mask_of_all(texts, self.num_words)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """The vocabulary of a model whose logits have `vocab_size` columns.

    Raises InvalidRequest if the bytes of a token depend on its neighbours, or if the model has no EOS token.
    """
    token_bytes = tokenizer.token_bytes
    if token_bytes is None:
        raise InvalidRequest("this model's tokenizer does not support structured output")
    known_eos = frozenset(token for token in eos_ids if token < vocab_size)
    if not known_eos:
        raise InvalidRequest("structured output needs a model with an EOS token, and this model has none")
    num_known = min(vocab_size, max(tokenizer.vocab_size, max(tokenizer.special_ids, default=-1) + 1))
    tokens = [token_bytes[token] for token in range(num_known)] + [b""] * (vocab_size - num_known)
    special = frozenset(token for token in tokenizer.special_ids | known_eos if token < vocab_size)
    texts = {tokenizer.id_to_token(token) or "": token for token in special - known_eos}
    return Vocabulary(tokens, special, known_eos, texts, lambda text: tokenizer.encode(text, add_special_tokens=False))


def compile_and_check(compiler: GrammarCompiler, spec: GrammarSpec, num_words: int) -> Grammar:
    """Compile a grammar, and check that an output can begin. Raises InvalidRequest."""
    grammar = compiler.compile(spec)
    bits = np.zeros((1, num_words), np.int32)
    try:
        grammar.start().fill(bits, 0)
    except GrammarFailed as error:
        raise invalid(spec, str(error)) from None
    if not bits.any():
        raise invalid(spec, "no text matches it")
    return grammar


def invalid(spec: GrammarSpec, reason: str) -> InvalidRequest:
    """The error for a grammar that cannot be compiled."""
    first = " ".join(reason.split())[:_SHOWN_CHARS] or "the library gives no reason"
    return InvalidRequest(f"{spec.kind} cannot be used: {first}", param=spec.kind)


class GrammarState:
    """The grammar of one request: its matcher, the time that it may take, and the tokens that must wait.

    The tokens that end the request are masked before `min_new_tokens`, unless the grammar allows nothing else. With
    `ignore_eos` the same holds for EOS at any time. So a mask is never empty.
    """

    def __init__(
        self,
        grammar: Grammar,
        eos_ids: frozenset[int],
        sampling: SamplingParams,
        num_words: int,
        *,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock`: seconds that this thread has computed. Raises GrammarFailed."""
        self._time = _TimeLimit(clock)
        self._draft_time = _TimeLimit(clock)
        """Drafts have a limit of their own, so that the time they take never ends a request."""
        self._matcher = self._time.call(grammar.start)
        self._eos_ids = eos_ids
        self._num_words = num_words
        self._bars: list[tuple[int, Int32Array]] = []
        """Until which number of output tokens which tokens are allowed."""
        if sampling.min_new_tokens:
            stops = ~mask_of_all([*eos_ids, *(sampling.stop_token_ids or ())], num_words)
            self._bars.append((sampling.min_new_tokens, stops))
        if sampling.ignore_eos:
            self._bars.append((_FOREVER, ~mask_of_all(eos_ids, num_words)))
        self.is_over = False
        """EOS was accepted."""
        self._masks: list[Int32Array] = []
        """The masks of the next token and of those after `_drafts`, as far as they are known: [num_words] each."""
        self._drafts: list[int] = []
        """Tokens that may come next, one after the other."""

    def fill(self, bits: Int32Array, line: int, num_output_tokens: int) -> None:
        """Write the mask of the next token to `bits[line]`: at least one bit. Raises GrammarFailed."""
        if self._masks:
            bits[line] = self._masks[0]
        else:
            self._fill(self._matcher, self._time, bits, line, num_output_tokens)

    def fill_after(self, drafts: Sequence[int], bits: Int32Array, line: int) -> None:
        """Write the masks after each of the drafts, which `look_ahead` has allowed, to `bits[line:]`."""
        assert self._drafts[: len(drafts)] == list(drafts)
        for place, mask in enumerate(self._masks[1 : 1 + len(drafts)], start=line):
            bits[place] = mask

    def forced_token(self, num_output_tokens: int) -> int | None:
        """The next token, if its mask allows no other. The mask is kept for `fill`. Raises GrammarFailed."""
        return only_token(self._next_mask(num_output_tokens))

    def look_ahead(self, drafts: Sequence[int], num_output_tokens: int) -> int:
        """The number of drafts before the first one that the grammar forbids, or that would end the output.

        The masks after them are kept for `fill_after`. A failure of the library ends the drafts of this request, and
        nothing else: they may be wrong. If they have taken too much time, they come again when tokens have earned some.
        """
        known = 0
        while known < min(len(drafts), len(self._drafts)) and drafts[known] == self._drafts[known]:
            known += 1
        if known == len(drafts) or (known and not self._may_follow(drafts[known], self._masks[known])):
            return known
        self._drafts, self._masks = [], self._masks[:1]
        matcher = self._matcher
        try:
            mask = self._next_mask(num_output_tokens)
            for token in drafts:
                if not self._may_follow(token, mask) or self._draft_time.is_over:
                    break
                if not self._drafts:
                    matcher = self._draft_time.call(matcher.fork)
                self._draft_time.call(matcher.accept, token)
                mask = self._mask(matcher, self._draft_time, num_output_tokens + len(self._drafts) + 1)
                self._drafts.append(token)
                self._masks.append(mask)
        except GrammarFailed:
            if not self._draft_time.is_over:  # more tokens do not help a library that has failed
                self._draft_time.end()
        return len(self._drafts)

    def accept(self, token: int) -> None:
        """Take the next token. Raises GrammarFailed."""
        self._masks, self._drafts = [], []
        if token in self._eos_ids:
            self.is_over = True
        else:
            self._time.earn()
            self._draft_time.earn()
            self._time.call(self._matcher.accept, token)

    def _may_follow(self, token: int, mask: Int32Array) -> bool:
        """Whether a token that the mask is for can be a draft."""
        return token not in self._eos_ids and is_allowed(mask, token)

    def _next_mask(self, num_output_tokens: int) -> Int32Array:
        if not self._masks:
            self._masks.append(self._mask(self._matcher, self._time, num_output_tokens))
        return self._masks[0]

    def _mask(self, matcher: Matcher, time_limit: _TimeLimit, num_output_tokens: int) -> Int32Array:
        bits = np.empty((1, self._num_words), np.int32)
        self._fill(matcher, time_limit, bits, 0, num_output_tokens)
        mask: Int32Array = bits[0]
        return mask

    def _fill(
        self, matcher: Matcher, time_limit: _TimeLimit, bits: Int32Array, line: int, num_output_tokens: int
    ) -> None:
        time_limit.call(matcher.fill, bits, line)
        for until, allowed in self._bars:
            if num_output_tokens < until:
                kept = bits[line] & allowed
                if kept.any():
                    bits[line] = kept


class _TimeLimit:
    """The time that calls of a library may take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spare_s = _SPARE_S

    @property
    def is_over(self) -> bool:
        return self._spare_s < 0

    def end(self) -> None:
        """Leave no time for further calls."""
        self._spare_s = -math.inf

    def earn(self) -> None:
        """A token has come."""
        self._spare_s = min(self._spare_s + _EARNED_S, _SPARE_S)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the library. Raises GrammarFailed for any error of the library, and if it takes too much time."""
        began_s = self._clock()
        try:
            result = function(*arguments)
        except GrammarFailed:
            raise
        except Exception:
            logger.exception("The library of a grammar failed")
            raise GrammarFailed("its library failed; the server's log has the details") from None
        self._spare_s -= self._clock() - began_s
        if self.is_over:
            raise GrammarFailed("its masks take too much time")
        return result


def only_token(mask: Int32Array) -> int | None:
    """The token of a mask [num_words] with one bit. None if it has more."""
    if np.count_nonzero(mask) != 1:
        return None
    words = mask.view(np.uint32)
    place = int(words.argmax())
    word = int(words[place])
    return None if word & (word - 1) else NUM_BITS * place + word.bit_length() - 1


def is_allowed(mask: Int32Array, token: int) -> bool:
    """Whether a mask [num_words] allows a token. It allows none that it has no bit for."""
    word, bit = divmod(token, NUM_BITS)
    return word < len(mask) and bool(mask[word] >> bit & 1)


def mask_of(token: int, num_words: int) -> Int32Array:
    """The mask [num_words] that allows one token."""
    mask = np.zeros(num_words, np.uint32)
    mask[token // NUM_BITS] = 1 << token % NUM_BITS
    words: Int32Array = mask.view(np.int32)
    return words


def mask_of_all(token_ids: Iterable[int], num_words: int) -> Int32Array:
    """The mask [num_words] that allows these tokens, as far as it has a bit for them."""
    allowed = np.zeros(num_words * NUM_BITS, np.uint8)
    ids = np.fromiter(token_ids, np.int64)
    allowed[ids[ids < len(allowed)]] = 1
    words: Int32Array = np.packbits(allowed, bitorder="little").view(np.int32)
    return words
