"""What the lower tiers, host memory and files, know about a request (kv_tiers.py)."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from ..mem_cache.block_keys import BlockKeys
from ..mem_cache.host_blocks import HostBlocks
from ..mem_cache.kv_storage import KVStorage, ReadJob
from ..model_executor.step import Int32Array


class ExpectedEnd(NamedTuple):
    """The end of the KV that is found for a request, in tokens."""

    start: int
    """Tokens that the prefix cache has."""
    num_output: int
    """Output tokens of the request."""
    end: int


@dataclass(eq=False, slots=True)
class ReqTiers:
    """The state of one request. Only KVTiers changes it."""

    keys: BlockKeys
    num_admitted: int = 0
    """Its tokens at its last admission. If it has more, the KV of all but the newest and the `num_unchecked` before it
    gave finite logits."""
    jobs: list[ReadJob] = field(default_factory=list)
    """The reads that it waited for since it was last released. They may have begun for other requests."""
    give_up_s: float | None = None
    """When it no longer waits for reads. None: it has not asked for any."""
    is_settled: bool = False
    """Whether it waits for no read, because there is nothing to read or because it has waited long enough."""

    expected: ExpectedEnd | None = None
    """What KVTiers has last told a policy."""
    _found: range = range(0)
    """Blocks that `expect_end` has found."""
    _next_key: bytes | None = None
    """Of the block after them, which no place had; None: the tokens do not fill it."""
    _oldest_use: float = 0
    """Of those of them that host memory has."""
    _num_forgotten: int | None = None
    """Keys of files that were forgotten before it found them; None: it did not look at files."""

    @property
    def job(self) -> ReadJob | None:
        """The last read that it waited for."""
        return self.jobs[-1] if self.jobs else None

    @property
    def read(self) -> set[bytes]:
        """The keys of the blocks that were read for it."""
        return {key for job in self.jobs for key, _ in job.blocks[: job.num_read]}

    @property
    def awaits_files(self) -> bool:
        """Whether it stays in the queue because of a read."""
        return self.job is not None and not self.is_settled

    def num_checked(self, num_tokens: int, num_unchecked: int, kv_len: int, *, is_complete: bool) -> int:
        """The tokens, from the first on, whose KV is known to give finite logits. The arguments are those of `Req`.

        `is_complete`: the request has ended, without an abort.
        """
        if num_tokens > self.num_admitted:
            return min(num_tokens - 1 - num_unchecked, kv_len)
        return min(num_tokens, kv_len) if is_complete else 0

    def restart(self) -> None:
        """It waits again, after a retraction."""
        self.jobs = []
        self.give_up_s = self.expected = None
        self.is_settled = False

    def find_end(self, tokens: Int32Array, first: int, places: Sequence[Container[bytes]]) -> int:
        """The index of the first block from `first` on that no place has, or that `tokens` do not fill.

        Hashes no more blocks than are found, and one.
        """
        keys = self.keys
        index = _end_of_known(keys.keys, first, places)
        while index >= len(keys.keys) and (key := keys.key(tokens, index)) is not None:
            if not any(key in place for place in places):
                break
            index += 1
        return index

    def expect_end(self, tokens: Int32Array, first: int, blocks: HostBlocks, files: KVStorage | None) -> int:
        """As `find_end`, in host memory and, unless None, in files. What it has found is looked up again only if it may
        have gone: a policy calls this often for each waiting request."""
        num_forgotten = None if files is None else files.forgotten.count
        oldest_use = self._oldest_use
        found = self._still_found(files) if oldest_use > blocks.forgotten_until else None
        if found is None or not found.start <= first <= found.stop:
            found, oldest_use = range(first, first), math.inf
        end = self.find_end(tokens, found.stop, [blocks.index] if files is None else [blocks.index, files.index])
        if end > found.stop:
            oldest_use = min(oldest_use, blocks.oldest_use(self.keys.keys[found.stop : end]))
        self._found, self._oldest_use, self._num_forgotten = range(found.start, end), oldest_use, num_forgotten
        self._next_key = self.keys.key(tokens, end)
        return end

    def is_current(self, blocks: HostBlocks, files: KVStorage | None) -> bool:
        """Whether `expect_end` would certainly find the same again. It takes far less time."""
        if self._oldest_use <= blocks.forgotten_until or self._next_key in blocks.index:
            return False
        if files is None:
            return self._num_forgotten is None
        return self._num_forgotten == files.forgotten.count and self._next_key not in files.index

    def _still_found(self, files: KVStorage | None) -> range | None:
        """Those blocks of `_found` before the first one whose file has gone. None: it is not known which."""
        if files is None:
            return self._found if self._num_forgotten is None else None
        gone = None if self._num_forgotten is None else files.forgotten.after(self._num_forgotten)
        if gone is None:
            return None
        places = [self.keys.places[key] for key in gone if key in self.keys.places]
        return range(self._found.start, min((one for one in places if one in self._found), default=self._found.stop))


def _end_of_known(keys: Sequence[bytes], index: int, places: Sequence[Container[bytes]]) -> int:
    """The first index from `index` on whose key no place has, or the number of keys. No Python code runs for a key."""
    before = -1
    while index != before:
        before = index
        for place in places:
            index += len(list(takewhile(place.__contains__, keys[index:])))
    return index
