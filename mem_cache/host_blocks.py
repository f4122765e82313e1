"""The blocks of host KV memory: which are free, which hold the KV of which key, and which are in use.

A block is in exactly one of these states:

    free        no key, no pin
    kept        a key and no pin: it can be found, and it can be reused for another key, least recently used first
    pinned      with a key (copied, written to disk, or about to be loaded), or without one (being filled)
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence


class HostBlocks:
    """Blocks 0 .. num_blocks - 1. For each block or key a call takes a constant time, except `clear` and `audit`."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._block_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._pins = [0] * num_blocks
        self.num_dropped = 0
        """Kept blocks that were taken for something else."""
        self._num_uses = 0
        self._last_use = [0] * num_blocks
        """Of each block, the number of its last use. Uses are counted from 1."""
        self.forgotten_until = 0
        """The last use of the key that was forgotten last. Those of all earlier uses are forgotten, unless pinned."""
        self.on_drop: Callable[[bytes], None] | None = None
        """Called with the key of each kept block that is taken for something else."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_pins(self) -> int:
        """O(num_blocks)."""
        return sum(self._pins)

    @property
    def index(self) -> Container[bytes]:
        """The keys that `find` finds now."""
        return self._block_of

    def find(self, key: bytes) -> int | None:
        """The block of this key. Has no effect."""
        return self._block_of.get(key)

    def oldest_use(self, keys: Iterable[bytes]) -> float:
        """The least recent of the last uses of these keys' blocks; infinite without any.

        As long as it is above `forgotten_until`, `find` finds all that it finds now: the least recently used block is
        forgotten first.
        """
        blocks = [block for block in map(self._block_of.get, keys) if block is not None]
        return min(map(self._last_use.__getitem__, blocks), default=math.inf)

    def is_pinned(self, block: int) -> bool:
        return self._pins[block] > 0

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of a prefix. `keys`: of consecutive blocks. The first one counts as used last: without it, the
        others cannot be found. Blocks that are pinned or missing are left out."""
        for key in reversed(keys):
            block = self._block_of.get(key)
            if block is not None and block in self._kept:
                self._kept.move_to_end(block)
                self._use(block)

    def take(self) -> int | None:
        """A block to fill, without a key and pinned once: a free one, or else the least recently used one.

        Returns None if all blocks are pinned.
        """
        if self._free:
            block = self._free.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
            self.forgotten_until = self._last_use[block]
            self.num_dropped += 1
        else:
            return None
        self._pins[block] = 1
        return block

    def name(self, block: int, key: bytes) -> None:
        """Give a key to a pinned block without one. If another block has that key, the new one stays without."""
        assert self._pins[block] and self._key_of[block] is None
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._use(block)

    def pin(self, block: int) -> None:
        """Keep a block as it is. Needs one `unpin`."""
        self._kept.pop(block, None)
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        """Undo one `pin`, or the pin of `take`. The end of the last pin counts as a use."""
        assert self._pins[block] > 0, "unpinned more often than pinned"
        self._pins[block] -= 1
        if self._pins[block]:
            return
        if self._key_of[block] is None:
            self._free.append(block)
        else:
            self._kept[block] = None
            self._use(block)

    def clear(self) -> None:
        """Forget all keys. Pinned blocks become free with their last `unpin`."""
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of = {}
        self.forgotten_until = self._num_uses
        self._free.extend(self._kept)
        self._kept.clear()

    def rebuild(self, pinned: Iterable[int]) -> None:
        """After `audit` failed: forget everything but these pins. `pinned`: a block for each pin."""
        self._pins = [0] * self.num_blocks
        for block in pinned:
            self._pins[block] += 1
        self._free = [block for block in range(self.num_blocks - 1, -1, -1) if not self._pins[block]]
        self._kept.clear()
        self._block_of = {}
        self._key_of = [None] * self.num_blocks
        self.forgotten_until = self._num_uses

    def audit(self) -> None:
        """Raises AssertionError unless each block is in exactly one state. O(num_blocks)."""
        pinned = {block for block, pins in enumerate(self._pins) if pins}
        states = [*self._free, *self._kept, *pinned]
        if sorted(states) != list(range(self.num_blocks)):
            raise AssertionError(f"{len(states)} states of {self.num_blocks} host blocks")
        keyed = {block: key for block, key in enumerate(self._key_of) if key is not None}
        if keyed != {block: key for key, block in self._block_of.items()}:
            raise AssertionError("the keys of the host blocks and their index differ")
        if not keyed.keys() >= self._kept.keys() or keyed.keys() & set(self._free):
            raise AssertionError("a kept host block has no key, or a free one has a key")

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        assert key is not None
        del self._block_of[key]
        self._key_of[block] = None
        if self.on_drop is not None:
            self.on_drop(key)

    def _use(self, block: int) -> None:
        self._num_uses += 1
        self._last_use[block] = self._num_uses
