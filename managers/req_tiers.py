"""What the tiers of the KV cache know about a request (kv_tiers.py). A request without tiers has none."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from ..mem_cache.block_keys import BlockKeys
from ..mem_cache.kv_storage import ReadJob
from ..model_executor.step import Int32Array


@dataclass(eq=False, slots=True)
class ReqTiers:
    """The state of one request. Only KVTiers changes it."""

    keys: BlockKeys
    num_admitted: int = 0
    """Its tokens at its last admission. If it has more, the KV of all but the newest and the `num_unchecked` before it
    gave finite logits."""
    job: ReadJob | None = None
    """The last read that it waited for since it was last released."""
    give_up_s: float | None = None
    """When it no longer waits for reads. None: it has not asked for any."""
    is_settled: bool = False
    """Whether it waits for no read, because there is nothing to read or because it has waited long enough."""

    _found: range = range(0)
    """Blocks that `find_end` has found, as of `_found_version`."""
    _found_version: object = None

    @property
    def awaits_files(self) -> bool:
        """Whether it stays in the queue because of a read."""
        return self.job is not None and not self.is_settled

    def restart(self) -> None:
        """It waits again, after a retraction."""
        self.job = self.give_up_s = None
        self.is_settled = False

    def find_end(
        self, tokens: Int32Array, first: int, places: Sequence[Container[bytes]], version: object = None
    ) -> int:
        """The index of the first block from `first` on that no place has, or that `tokens` do not fill.

        Hashes no more blocks than are found, and one. Blocks that a call with an equal `version` has found are not
        looked up again. `version` None: looks up all.
        """
        index = first
        if version is not None:
            if version == self._found_version and self._found.start <= first <= self._found.stop:
                first, index = self._found.start, self._found.stop
            self._found_version = version
        while self.keys.key(tokens, index) is not None:
            end = _end_of_known(self.keys.keys, index, places)
            if end == index:
                break
            index = end
        if version is not None:
            self._found = range(first, index)
        return index


def _end_of_known(keys: Sequence[bytes], index: int, places: Sequence[Container[bytes]]) -> int:
    """The first index from `index` on whose key no place has, or the number of keys. No Python code runs for a key."""
    before = -1
    while index != before:
        before = index
        for place in places:
            index += len(list(takewhile(place.__contains__, islice(keys, index, None))))
    return index
