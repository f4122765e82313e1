"""Finds the first stop string or regular expression in a text that comes in pieces, and never shows its beginning.

Used only for requests with `stop_regex`: it looks at each character in Python. stop_strings.py is the faster one for
strings alone, and this class has its interface.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..srt.text.stop_regex import Live, StopRegex, compile_stop_regex
from .stop_strings import StopSearch

MAX_HELD_CHARS = 256
"""The longest end of the text that regular expressions hold back."""


class StopPatternMatcher:
    """Passes text on until the first stop string or pattern has matched.

    First is the match that is complete earliest, and among those the one that begins earliest. `matched` is its text.
    The result depends on the text alone, not on how it was cut up.

    A pattern matches as soon as it can: `\\d+` ends the text at its first digit. Of a match of more than
    MAX_HELD_CHARS characters, only that many at its end count as the match; those before are shown.

    `keep`: the match is shown too, but nothing behind it; otherwise the text ends before it.
    """

    def __init__(self, stops: Sequence[str], patterns: Sequence[str], *, keep: bool = False) -> None:
        self.matched: str | None = None
        self._strings = [StopSearch(stop) for stop in stops]
        self._patterns = [_PatternSearch(compile_stop_regex(pattern)) for pattern in patterns]
        self._keep = keep
        self._held = ""

    @property
    def is_idle(self) -> bool:
        """Never: a regular expression may look at the character before its match."""
        return False

    def push(self, text: str) -> str:
        """The text that is safe to show now; none once there is a match."""
        if self.matched is not None:
            return ""
        shown = []
        for character in text:
            shown.append(self._read(character))
            if self.matched is not None:
                break
        return "".join(shown)

    def release(self) -> str:
        """What was held back: no more text will come. Empty once there is a match."""
        held, self._held = self._held, ""
        return held

    def _read(self, character: str) -> str:
        text = self._held + character
        matches = [(len(search.stop), 0) for search in self._strings if search.read(character) is not None]
        num_open = max([search.num_read for search in self._strings], default=0)
        for pattern in self._patterns:
            found = pattern.read(character)
            if found is not None:
                matches.append(found)
            num_open = max(num_open, pattern.num_open)
        if matches:
            num_matched, num_behind = max(matches, key=sum)
            end = len(text) - num_behind
            self.matched = text[end - num_matched : end]
            self._held = ""
            return text[: end if self._keep else end - num_matched]
        # A boundary after a match is known only with the character behind it, so `keep` holds text back, too.
        end = len(text) - num_open
        self._held = text[end:]
        return text[:end]


class _PatternSearch:
    """`num_open`: how many characters at the end of the text so far may be the beginning of a match."""

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        self._num_read = 0
        self._before = ""
        # The live states, ordered by where the text that led to each began.
        self._live: list[Live] = []

    @property
    def num_open(self) -> int:
        return self._num_matched(self._live[0][1]) if self._live else 0

    def read(self, character: str) -> tuple[int, int] | None:
        """The length of a match that this character completes, and 1 if it ends before this character, else 0."""
        regex, before = self._regex, self._before
        self._live.append((regex.first_state, self._num_read))
        live = regex.reach(self._live, lambda test: test(before, character))
        start = self._matched_in(live)
        if start is not None:
            return self._num_matched(start), 1
        steps = [(regex.steps[state], start) for state, start in live if state in regex.steps]
        read = [(then, start) for (test, then), start in steps if test(character)]
        self._live = regex.reach(read, lambda _: False) if read else []
        self._before = character
        self._num_read += 1
        start = self._matched_in(self._live)
        return None if start is None else (self._num_matched(start), 0)

    def _matched_in(self, live: Sequence[Live]) -> int | None:
        return next((start for state, start in live if state == self._regex.matched_state), None)

    def _num_matched(self, start: int) -> int:
        return min(self._num_read - start, MAX_HELD_CHARS)
