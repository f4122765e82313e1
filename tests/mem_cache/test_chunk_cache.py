from __future__ import annotations

import numpy as np

from tercet.mem_cache.chunk_cache import ChunkCache


def test_it_takes_nothing_and_finds_nothing() -> None:
    cache = ChunkCache(page_size=4)
    tokens = np.arange(8, dtype=np.int32)
    assert cache.insert(tokens, tokens + 4)[:2] == (0, 0)
    match = cache.match(tokens)
    assert len(match.slots) == 0 and match.slots.dtype == np.int32
    assert cache.match_len(tokens) == 0
    assert cache.match_path(tokens) == ((), 0)
    cache.lock(match.node, is_use=False)
    cache.move_lock(match.node, cache.match(tokens).node)
    cache.unlock(match.node)
    assert cache.evict(8) == 0
    assert (cache.page_size, cache.evictable_size, cache.protected_size) == (4, 0, 0)
    assert len(cache.audit()) == 0
    cache.reset()
    assert cache.match_len(tokens) == 0
