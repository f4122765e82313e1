"""The visible text of one answer, token by token: decoding and stop strings in one.

The scheduler uses it to see that a stop string is complete, the detokenizer to show the text up to there. As both push
the same tokens through the same class, they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..srt.io_struct import DecodeOptions
from ..srt.text.tokenizer import Tokenizer
from .incremental_decode import IncrementalDecoder
from .stop_strings import StopStringMatcher


class TextStream:
    """Give it every token of an answer, in order, in pieces of any size."""

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._decoder = IncrementalDecoder(tokenizer, options.skip_special_tokens)
        self._stops = StopStringMatcher(options.stop_strings, keep=options.no_stop_trim)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain: never half a character, never what may turn out part of a stop string."""
        return self._stops.push(self._decoder.push(token_ids))

    @property
    def matched(self) -> str | None:
        """The stop string that the text has reached. Nothing behind it is shown, whatever is pushed."""
        return self._stops.matched

    def finish(self) -> str:
        """The rest of the text, when the answer ended otherwise than by a stop string."""
        if self.matched is not None:
            return ""
        return self._stops.release() + self._decoder.finish()


class StopStringChecker:
    """The scheduler's side of it: which stop string, if any, the tokens so far have reached."""

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._stream = TextStream(tokenizer, options)

    def push(self, token_ids: Iterable[int]) -> str | None:
        """The stop string that the text reached with these tokens or before."""
        self._stream.push(token_ids)
        return self._stream.matched
