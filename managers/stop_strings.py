"""Find the first stop string in a text that comes in pieces, and never show the beginning of one.

Knuth-Morris-Pratt for each stop string: reading a character costs amortised constant time, and the state is the length
of the longest end of the text that is the beginning of the stop string, which is just what must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text on until the first stop string is complete.

    First is the one that ends earliest, and among those that end together the longest. `matched` is that stop string
    once it was found. The result depends on the text alone, not on how it was cut up.

    `keep`: the stop string is shown too, but nothing behind it; otherwise the text ends before it.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self.matched: str | None = None
        self._searches = [_Search(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._keep = keep
        self._num_partial = 0  # the longest beginning of a stop string that the text ends with
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is safe to show now; none once a stop string has matched."""
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
        """What was held back: no more text will come. Empty once a stop string has matched."""
        held, self._held = self._held, ""
        return held


class _Search:
    """`num_read`: how many characters at the end of the text so far are the beginning of the stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_read = 0
        # _shorter[n]: the longest proper beginning of stop[:n] that stop[:n] also ends with
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
        """Where in `text` the stop string first ends, if it does; reading on after that is not foreseen."""
        n, length = self.num_read, len(self.stop)
        for index, character in enumerate(text):
            n = self._next(n, character)
            if n == length:
                return index + 1
        self.num_read = n
        return None
