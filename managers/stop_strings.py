"""Finds the first stop string in a text that comes in pieces, and holds back every possible start of one.

Each stop string has a Knuth-Morris-Pratt search, so a character costs amortised constant time. The state of a search
is a length: that of the longest end of the text that is a start of the stop string. So much text must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text on until the first stop string is complete.

    The first stop string is the one that ends earliest. Of several that end together, it is the longest. `matched` is
    the stop string that was found. The result depends only on the text, not on its pieces.

    `keep`: the text ends after the stop string. Otherwise it ends before the stop string.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self.matched: str | None = None
        self._searches = [StopSearch(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._keep = keep
        self._num_partial = 0  # the longest start of a stop string that the text ends with
        self._held = ""

    @property
    def is_idle(self) -> bool:
        """Whether the text ends with no start of a stop string, and none was found."""
        return self._num_partial == 0 and self.matched is None

    def push(self, text: str) -> str:
        """The text that may be shown now. Empty after a match."""
        if self.matched is not None:
            return ""
        if self._num_partial == 0 and self._first_characters.isdisjoint(text):
            return text  # the usual case, without a loop in Python
        end = len(text)
        for search in self._searches:
            found = search.read(text[:end])
            if found is None:
                continue
            if self.matched is None or found < end or len(search.stop) > len(self.matched):
                self.matched = search.stop
            end = found
        text = self._held + text[:end]
        if self.matched is not None:
            self._held = ""
            return text if self._keep else text[: -len(self.matched)]
        self._num_partial = max((search.num_read for search in self._searches), default=0)
        shown = len(text) if self._keep else len(text) - self._num_partial
        self._held = text[shown:]
        return text[:shown]

    def release(self) -> str:
        """The text that was held back. Call it when no more text will come. Empty after a match."""
        held, self._held = self._held, ""
        return held


class StopSearch:
    """The search for one stop string. `num_read`: the length of the start of the stop string at the end of the text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_read = 0
        # _shorter[n]: the length of the longest proper start of stop[:n] that stop[:n] also ends with
        self._shorter = [0] * len(stop)
        border = 0
        for n in range(2, len(stop)):
            border = self._next(border, stop[n - 1])
            self._shorter[n] = border

    def _next(self, n: int, character: str) -> int:
        while n and self.stop[n] != character:
            n = self._shorter[n]
        return n + 1 if self.stop[n] == character else 0

    def read(self, text: str) -> int | None:
        """The index in `text` after the first stop string, if there is one. No text may be read after that."""
        n, length = self.num_read, len(self.stop)
        for index, character in enumerate(text):
            n = self._next(n, character)
            if n == length:
                return index + 1
        self.num_read = n
        return None
