"""The visible text of one answer, token by token: decoding and stop strings together.

The scheduler uses it to detect a complete stop string, and the detokenizer to show the text before it. Both push the
same tokens through the same class, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..srt.io_struct import DecodeOptions
from ..srt.text.tokenizer import Tokenizer
from .incremental_decode import IncrementalDecoder
from .stop_patterns import StopPatternMatcher
from .stop_strings import StopStringMatcher


class TextStream:
    """Converts the tokens of an answer to text. Push every token, in order, in pieces of any size."""

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._decoder = IncrementalDecoder(tokenizer, options.skip_special_tokens)
        stops, patterns, keep = options.stop_strings, options.stop_patterns, options.no_stop_trim
        self._stops = StopPatternMatcher(stops, patterns, keep) if patterns else StopStringMatcher(stops, keep)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that later tokens cannot change: no incomplete character, and no possible start of a stop string."""
        return self._stops.push(self._decoder.push(token_ids))

    @property
    def matched(self) -> str | None:
        """The stop string that the text has reached, if any. No text after it is shown."""
        return self._stops.matched

    def finish(self) -> str:
        """The rest of the text. Empty if the answer ended by a stop string."""
        if self.matched is not None:
            return ""
        return self._stops.release() + self._decoder.finish()


class StopStringChecker:
    """Detects stop strings for the scheduler."""

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._stream = TextStream(tokenizer, options)

    def push(self, token_ids: Iterable[int]) -> str | None:
        """The stop string that the text has reached with these tokens or before, if any."""
        self._stream.push(token_ids)
        return self._stream.matched
