"""The books of host blocks, in random lives, against a model that keeps a list."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tercet.mem_cache.host_blocks import HostBlocks

KEYS = [bytes([number]) for number in range(6)]


class BlockMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 5))
    def build(self, num_blocks: int) -> None:
        self.blocks = HostBlocks(num_blocks)
        self.pins: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self.kept: list[int] = []  # least recently used first
        self.found: dict[bytes, float] = {}
        self.dropped: list[bytes] = []
        self.told: list[bytes] = []
        self.blocks.on_drop = self.told.append

    @rule()
    def take(self) -> None:
        self.take_block()

    def take_block(self) -> int | None:
        block = self.blocks.take()
        if len(self.pins) == self.blocks.num_blocks:
            assert block is None
            return None
        assert block not in self.pins
        if len(self.pins) + len(self.kept) == self.blocks.num_blocks:
            assert block == self.kept.pop(0), "the least recently used one"
            self.dropped.append(self.keys.pop(block))
        assert block not in self.keys
        self.pins[block] = 1
        return block

    @rule(key=st.sampled_from(KEYS))
    def fill(self, key: bytes) -> None:
        """The life of most blocks. Without it, few steps have a choice between kept blocks."""
        block = self.take_block()
        if block is not None:
            self.name_block(block, key)
            self.unpin_block(block)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def name(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.pins)))
        if block not in self.keys:
            self.name_block(block, key)

    def name_block(self, block: int, key: bytes) -> None:
        self.blocks.name(block, key)
        if key not in self.keys.values():
            self.keys[block] = key
            assert self.blocks.oldest_use([key]) > self.blocks.forgotten_until

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        candidates = sorted({*self.pins, *self.kept})
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.blocks.pin(block)
            self.pins[block] = self.pins.get(block, 0) + 1
            if block in self.kept:
                self.kept.remove(block)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.unpin_block(data.draw(st.sampled_from(sorted(self.pins))))

    def unpin_block(self, block: int) -> None:
        self.blocks.unpin(block)
        self.pins[block] -= 1
        if not self.pins[block]:
            del self.pins[block]
            if block in self.keys:
                self.kept.append(block)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def touch(self, keys: list[bytes]) -> None:
        self.blocks.touch(keys)
        for key in reversed(keys):
            for block in [block for block in self.kept if self.keys[block] == key]:
                self.kept.remove(block)
                self.kept.append(block)

    @rule()
    def clear(self) -> None:
        self.blocks.clear()
        self.keys, self.kept = {}, []

    @invariant()
    def books_agree(self) -> None:
        self.blocks.audit()
        assert self.blocks.num_kept == len(self.kept)
        assert self.blocks.num_pins == sum(self.pins.values())
        assert self.blocks.num_free == self.blocks.num_blocks - len(self.pins) - len(self.kept)
        assert self.told == self.dropped and self.blocks.num_dropped == len(self.dropped)
        for key in KEYS:
            assert (key in self.blocks.index) == (key in self.keys.values())
            assert self.blocks.find(key) == next((block for block, one in self.keys.items() if one == key), None)
        uses = [self.blocks.oldest_use([self.keys[block]]) for block in self.kept]
        assert all(before < after for before, after in pairwise([self.blocks.forgotten_until, *uses]))
        each = [self.blocks.oldest_use([key]) for key in self.keys.values()]
        assert self.blocks.oldest_use(KEYS) == min(each, default=math.inf)
        for key in KEYS:
            if self.blocks.find(key) is not None:
                self.found.setdefault(key, self.blocks.oldest_use([key]))
            elif key in self.found:
                assert self.found.pop(key) <= self.blocks.forgotten_until
        assert all(self.blocks.is_pinned(block) == (block in self.pins) for block in range(self.blocks.num_blocks))


TestBlockMachine = BlockMachine.TestCase


def test_the_first_block_of_a_prefix_counts_as_used_last() -> None:
    blocks = HostBlocks(3)
    for key in KEYS[:3]:
        block = blocks.take()
        blocks.name(block, key)
        blocks.unpin(block)
    blocks.touch(KEYS[:2])
    assert [blocks._key_of[block] for block in blocks._kept] == [KEYS[2], KEYS[1], KEYS[0]]


def test_the_audit_finds_a_block_in_two_states_or_none() -> None:
    for spoil in (
        lambda blocks: blocks._free.append(0),
        lambda blocks: blocks._free.pop(),
        lambda blocks: blocks._block_of.clear(),
        lambda blocks: blocks._kept.update({2: None}),
        lambda blocks: (blocks._free.remove(2), blocks._kept.update({2: None})),
        lambda blocks: blocks._free.append(blocks._kept.popitem()[0]),
    ):
        blocks = HostBlocks(3)
        first = blocks.take()
        blocks.name(first, b"k")
        blocks.unpin(first)
        blocks.audit()
        spoil(blocks)
        with pytest.raises(AssertionError):
            blocks.audit()
        blocks.rebuild([1, 2, 1])
        blocks.audit()
        assert (blocks.num_free, blocks.num_kept, blocks.num_pins) == (1, 0, 3) and blocks.find(b"k") is None
        for block in (1, 1, 2):
            blocks.unpin(block)
        assert blocks.num_free == 3
