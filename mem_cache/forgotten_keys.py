"""The keys of KV files that were known and no longer are, in order. One thread adds keys, and any thread reads them."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_KEPT = 4096
"""To compare so many with what a request has found takes about as long as to look that up again."""


class ForgottenKeys:
    """Keeps the last `_NUM_KEPT` keys, and at most twice as many."""

    def __init__(self) -> None:
        self._recent: tuple[int, list[bytes]] = (0, [])
        """How many keys were dropped before those in the list, and the list. A reader gets both at once."""

    @property
    def count(self) -> int:
        """Of all keys so far."""
        num_dropped, keys = self._recent
        return num_dropped + len(keys)

    def add(self, key: bytes) -> None:
        num_dropped, keys = self._recent
        keys.append(key)
        if len(keys) > 2 * _NUM_KEPT:
            self._recent = (num_dropped + len(keys) - _NUM_KEPT, keys[-_NUM_KEPT:])

    def after(self, count: int) -> Sequence[bytes] | None:
        """The keys after the first `count`. None: some of them were dropped."""
        num_dropped, keys = self._recent
        return None if count < num_dropped else keys[count - num_dropped :]
