"""Turn token ids into text as they come, never half a character, in time linear in their number.

The text is that of an answer, which goes on where a prompt ended: a leading space stays, also where sentencepiece
vocabularies drop the first one of a whole text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from ..srt.text.token_bytes import TokenBytes
from ..srt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character is at most 4 bytes, so 4 tokens: what is no text after this many tokens never becomes text.
_MAX_PENDING = 6
_MAX_CONTEXT = 6


class _Stream(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class IncrementalDecoder:
    """The text of one growing sequence of tokens.

    For byte-level vocabularies all pushes and `finish` together are `tokenizer.decode` of all ids, exactly, however
    the ids were cut up. Bytes that form no character become U+FFFD, as soon as that is certain.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._stream: _Stream
        if tokenizer.token_bytes is not None:
            hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
            self._stream = _ByteStream(tokenizer.token_bytes, hidden)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens)

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain. OverflowError for an id that no vocabulary can have."""
        return self._stream.push(ids)

    def finish(self) -> str:
        """What was held back: no more ids will come."""
        return self._stream.finish()


class _ByteStream:
    """Where every token stands for bytes: nothing but a UTF-8 decoder with its at most 3 bytes of state."""

    def __init__(self, token_bytes: TokenBytes, hidden: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        spell, hidden = self._token_bytes, self._hidden
        return self._utf8.decode(b"".join([spell[token] for token in ids if token not in hidden]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowStream:
    """For any other decoder: the text of the last few tokens with the new ones, minus the text without them.

    A new text that ends in U+FFFD may be half a character, so it waits for more tokens, but not for long.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_shown = 0

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(token) for token in ids])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_shown < _MAX_PENDING:
            return ""
        self._window = self._window[-_MAX_CONTEXT:]
        self._num_shown = len(self._window)
        return text

    def _new_text(self) -> str:
        shown = self._decode(self._window[: self._num_shown])
        return self._decode(self._window)[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def finish(self) -> str:
        text = self._new_text()
        self._window, self._num_shown = [], 0
        return text
