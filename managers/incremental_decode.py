"""Converts token ids to text as they come, in linear time. It never returns an incomplete character.

The text continues a prompt, so a leading space stays. Sentencepiece decoders drop the leading space of a whole text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

from ..srt.text.token_bytes import TokenBytes
from ..srt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, so at most 4 tokens. Bytes that are no text after this many tokens never are.
_MAX_PENDING = 6
_MAX_CONTEXT = 6
_MAX_INCOMPLETE = 3
"""The most bytes of a character without its last one. A byte may be a token."""


class _Stream(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...

    def holds_back(self) -> bool: ...

    def finish(self) -> str: ...


class IncrementalDecoder:
    """The text of one growing sequence of tokens.

    With a byte-level vocabulary, all pushes and `finish` together return exactly `tokenizer.decode` of all ids,
    in whatever pieces the ids come. Bytes that form no character become U+FFFD as soon as that is certain.

    `shown`: special tokens that are not skipped.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown: Iterable[int] = ()) -> None:
        stream: _Stream
        hidden = tokenizer.special_ids.difference(shown) if skip_special_tokens else frozenset()
        if tokenizer.token_bytes is not None:
            stream = _ByteStream(tokenizer.token_bytes, hidden)
        else:
            stream = _WindowStream(tokenizer, hidden)
        self.push: Callable[[Iterable[int]], str] = stream.push
        """The text that later ids cannot change. Raises OverflowError for an id that no vocabulary can have."""
        self.holds_back: Callable[[], bool] = stream.holds_back
        """Whether the last tokens end inside a character, as far as is known."""
        self.finish: Callable[[], str] = stream.finish
        """The text that is held back, if no more ids come. It changes nothing."""


class _ByteStream:
    """For vocabularies whose tokens stand for bytes: a UTF-8 decoder, with at most 3 bytes of state."""

    def __init__(self, token_bytes: TokenBytes, hidden: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        assert isinstance(utf8, codecs.BufferedIncrementalDecoder)
        self._utf8 = utf8

    def push(self, ids: Iterable[int]) -> str:
        spell, hidden, utf8 = self._token_bytes, self._hidden, self._utf8
        new = b"".join([spell[token] for token in ids if token not in hidden])
        if new.isascii() and not utf8.buffer:  # the usual case, three times as fast
            return new.decode("ascii")
        return utf8.decode(new)

    def holds_back(self) -> bool:
        return bool(self._utf8.buffer)

    def finish(self) -> str:
        return self._utf8.buffer.decode(errors="replace")


class _WindowStream:
    """For all other vocabularies. It decodes the last few tokens with and without the new ones: the difference is new.

    New text that ends in U+FFFD may be an incomplete character, so it waits for a few more tokens. If they do not
    complete it, its last tokens may still be the beginning of another one.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []
        self._num_shown = 0

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token) for token in ids if token not in self._hidden])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text, num_kept = self._new_text(), 0
        if text.endswith(_REPLACEMENT):
            if len(self._window) - self._num_shown < _MAX_PENDING:
                return ""
            num_kept = _MAX_INCOMPLETE
            text = self._new_text(len(self._window) - num_kept)
        self._window = self._window[-_MAX_CONTEXT:]
        self._num_shown = len(self._window) - num_kept
        return text

    def _new_text(self, end: int | None = None) -> str:
        """The text of the tokens before `end` that is not shown."""
        shown = self._decode(self._window[: self._num_shown])
        return self._decode(self._window[:end])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def holds_back(self) -> bool:
        return len(self._window) > self._num_shown

    def finish(self) -> str:
        return self._new_text()
