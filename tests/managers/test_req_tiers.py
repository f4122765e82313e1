"""ReqTiers: where the blocks of a request are found, and when they are looked up again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tier_asks import CountingDict

from tercet.managers.req_tiers import ReqTiers
from tercet.mem_cache.block_keys import BlockKeys
from tercet.mem_cache.forgotten_keys import ForgottenKeys
from tercet.mem_cache.host_blocks import HostBlocks


def test_what_was_found_is_looked_up_again_only_after_it_may_have_gone() -> None:
    tokens = np.arange(100, dtype=np.int32)
    keys = BlockKeys(b"", "", 4).cover(tokens)
    blocks = HostBlocks(17)
    for key in [b"old", *reversed(keys[:15])]:
        block = blocks.take()
        blocks.name(block, key)
        blocks.unpin(block)
    blocks._block_of = known = CountingDict(blocks._block_of)
    state = ReqTiers(BlockKeys(b"", "", 4))
    assert state.expect_end(tokens, 3, blocks, None) == 15
    for first, is_known in ((3, True), (10, True), (15, True), (0, False), (5, True), (20, False), (4, False)):
        known.num_looked_up = 0
        assert state.expect_end(tokens, first, blocks, None) == max(first, 15)
        assert (known.num_looked_up <= 2) == (is_known or first == 20)
    added = blocks.take()
    blocks.name(added, keys[15])
    blocks.unpin(added)
    assert state.expect_end(tokens, 4, blocks, None) == 16, "what is added is found"
    assert blocks.take() is not None and blocks.find(b"old") is None
    known.num_looked_up = 0
    assert state.expect_end(tokens, 4, blocks, None) == 16
    assert known.num_looked_up <= 2, "the block of another prefix has gone"
    for end in (14, 13):
        assert blocks.take() is not None
        assert state.expect_end(tokens, 4, blocks, None) == end
    blocks.clear()
    assert state.expect_end(tokens, 4, blocks, None) == 4


def test_a_change_of_what_was_found_is_noticed_without_a_look_up() -> None:
    tokens = np.arange(40, dtype=np.int32)
    state, blocks = ReqTiers(BlockKeys(b"", "", 4)), HostBlocks(4)
    keys = state.keys.cover(tokens)
    files = SimpleNamespace(forgotten=ForgottenKeys(), index={keys[2]})

    def add(key: bytes) -> None:
        block = blocks.take()
        blocks.name(block, key)
        blocks.unpin(block)

    add(keys[1])
    add(keys[0])
    changes = [
        (lambda: files.forgotten.add(keys[7]), 3),  # a later block of the same prompt
        (lambda: files.index.add(keys[3]), 4),
        (lambda: add(keys[4]), 5),
        (lambda: [blocks.take() for _ in range(2)], 1),  # a free one, and the least recently used one
    ]
    assert state.expect_end(tokens, 0, blocks, files) == 3
    for change, end in changes:
        assert state.is_current(blocks, files)
        change()
        assert not state.is_current(blocks, files)
        assert state.expect_end(tokens, 0, blocks, files) == end


@given(places=st.lists(st.sets(st.integers(0, 9)), max_size=3), first=st.integers(0, 12), length=st.integers(0, 10))
def test_the_end_of_what_some_place_has(places: list[set[int]], first: int, length: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    keys = BlockKeys(b"", "", 1).cover(np.arange(10, dtype=np.int32))
    expected = first
    while expected < length and any(expected in place for place in places):
        expected += 1
    state = ReqTiers(BlockKeys(b"", "", 1))
    assert state.find_end(tokens, first, [{keys[one] for one in place} for place in places]) == expected
    assert len(state.keys.keys) <= expected + 1


class CountingList(list[bytes]):
    """Counts the keys that are read or copied."""

    num_read = 0

    def __iter__(self) -> Iterator[bytes]:
        for key in super().__iter__():
            self.num_read += 1
            yield key

    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def test_the_time_of_a_first_look_up_grows_with_the_number_of_blocks() -> None:
    """A prompt of a million tokens has 15,625 blocks, and their keys are not known before."""
    tokens = np.arange(1000, dtype=np.int32)
    state = ReqTiers(BlockKeys(b"", "", 1))
    state.keys.keys = keys = CountingList()
    assert state.find_end(tokens, 0, [set(BlockKeys(b"", "", 1).cover(tokens))]) == 1000
    assert keys.num_read <= 3 * 1000
