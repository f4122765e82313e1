"""The visible text of one answer, token by token: decoding and stop strings together.

The scheduler uses it to detect a complete stop string, and the detokenizer to show the text before it. Both push
tokens through the same class, so they cannot disagree. The scheduler leaves out tokens that cannot matter.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol

from ..srt.io_struct import DecodeOptions
from ..srt.text.tokenizer import Tokenizer
from .incremental_decode import IncrementalDecoder
from .stop_patterns import StopPatternMatcher
from .stop_strings import StopStringMatcher


class TextStream:
    """Converts the tokens of an answer to text. Push every token, in order, in pieces of any size."""

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._decoder = IncrementalDecoder(
            tokenizer, skip_special_tokens=options.skip_special_tokens, shown=options.shown_tokens
        )
        stops, patterns, keep = options.stop_strings, options.stop_patterns, options.no_stop_trim
        self._stops = (
            StopPatternMatcher(stops, patterns, keep=keep) if patterns else StopStringMatcher(stops, keep=keep)
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that later tokens cannot change: no incomplete character, and no possible start of a stop string."""
        return self._stops.push(self._decoder.push(token_ids))

    @property
    def matched(self) -> str | None:
        """The stop string that the text has reached, if any. No text after it is shown."""
        return self._stops.matched

    @property
    def is_idle(self) -> bool:
        """Whether the text ends inside no character and inside no possible stop string, and has reached none."""
        return self._stops.is_idle and not self._decoder.holds_back()

    def finish(self) -> str:
        """The rest of the text. Empty if the answer ended by a stop string."""
        if self.matched is not None:
            return ""
        return self._stops.release() + self._decoder.finish()


class StopChecker(Protocol):
    """Watches the text of one request for its stop strings."""

    @property
    def quiet(self) -> Container[int]:
        """Tokens that need not be pushed now, because no stop string can have begun or can begin with them."""

    def push(self, token: int) -> str | None:
        """The stop string that this token completes, if any."""


class StopStringChecker:
    """Detects stop strings for the scheduler (StopChecker).

    A stop string begins with a byte that begins a character. In UTF-8 such a byte is never a part of another character,
    whatever comes before it. So while the stream is idle, a token without the first byte of any stop string changes
    nothing, and its text is not needed. Such tokens are `quiet`, as far as they are known.
    """

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._stream = TextStream(tokenizer, options)
        starts = {stop[0] for stop in options.stop_strings}
        self._first_bytes = frozenset(start.encode(errors="surrogatepass")[0] for start in starts)
        # Many different bytes become U+FFFD, so a stop string that begins with it has no first byte.
        self._can_skip = tokenizer.token_bytes is not None and "\ufffd" not in starts
        self._token_bytes: dict[int, bytes] = {}
        self._harmless: set[int] = set()
        """Tokens without any of the first bytes. Checkers with the same first bytes share the set."""
        if tokenizer.token_bytes is not None:
            self._token_bytes = tokenizer.token_bytes
            self._harmless = tokenizer.token_bytes.known_without(self._first_bytes)
        self.quiet: Container[int] = ()
        """Tokens that need not be pushed now. It changes with each push."""
        self._update()

    def push(self, token: int) -> str | None:
        """The stop string that the text has reached with this token or before, if any."""
        if self._is_idle and self._first_bytes.isdisjoint(self._token_bytes[token]):
            self._harmless.add(token)
            return None
        self._stream.push((token,))
        self._update()
        return self._stream.matched

    def _update(self) -> None:
        self._is_idle = self._can_skip and self._stream.is_idle
        self.quiet = self._harmless if self._is_idle else ()
