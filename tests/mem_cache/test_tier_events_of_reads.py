"""KV events of blocks that are read from files while something else happens to these."""

from __future__ import annotations

import numpy as np
import pytest
from kv_event_reader import DISK, HOST

from tercet.mem_cache.block_keys import BlockKeys
from tercet.mem_cache.tier_events import TierEvents
from tercet.srt.kv_events import BlockRemoved, BlockStored, KVEvent


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_block_that_is_read_is_known_in_both_places_whenever_its_file_is_found(when: str) -> None:
    tokens, keys, found = np.arange(8, dtype=np.int32), BlockKeys(b"fake", "", 8), list[KVEvent]()
    (key,) = keys.cover(tokens)
    events = TierEvents(4, 8, b"fake", found.append)
    for step in ("before", "during", "after"):
        if step == when:
            events.on_file(key, keys.content(tokens, 0))
        if step == "before":
            events.on_read_begins([key], 0, tokens, "")
        elif step == "during":
            events.on_read(key, is_kept=True)
    events.on_file(key, None)
    events.on_dropped(key)
    kinds = [(type(event), event.medium) for event in found]
    assert sorted(kinds[:2], key=str) == [(BlockStored, HOST), (BlockStored, DISK)]
    assert kinds[2:] == [(BlockRemoved, DISK), (BlockRemoved, HOST)]


def test_a_read_that_fails_leaves_nothing_behind() -> None:
    tokens, keys, found = np.arange(8, dtype=np.int32), BlockKeys(b"fake", "", 8), list[KVEvent]()
    (key,) = keys.cover(tokens)
    events = TierEvents(4, 8, b"fake", found.append)
    events.on_read_begins([key], 0, tokens, "")
    events.on_read(key, is_kept=False)
    events.on_dropped(key)
    assert not found and not events._reading and not events._blocks
