"""Requests to a Rig with tiers below its KV pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE_S
from scheduler_rig import Rig

from fakes import expected_output
from tercet.mem_cache.block_keys import BlockKeys

VOCAB = 97


class CountingDict(dict[bytes, int]):
    """An index of blocks that counts its look-ups."""

    num_looked_up = 0

    def __contains__(self, key: object) -> bool:
        self.num_looked_up += 1
        return super().__contains__(key)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def keys_of(ids: list[int]) -> list[bytes]:
    """Of the blocks of a Rig with pages of 4 tokens."""
    return BlockKeys(b"fake", "", 8).cover(np.array(ids, np.int32))


def ask(rig: Rig, rid: str, ids: list[int], max_new_tokens: int = 4, salt: str = "") -> tuple[int, int, int]:
    """Runs one request. Returns its cached tokens: all, from host memory, from files. Checks its output."""
    rig.add(rid, ids, salt, max_new_tokens=max_new_tokens)
    rig.run()
    assert rig.heard[rid].ids == expected_output(ids, 1, max_new_tokens, VOCAB)
    counts = rig.heard[rid].last.counts
    return counts.cached_tokens, counts.host_tokens, counts.storage_tokens


def settle(rig: Rig) -> None:
    """Makes the copies that wait for a step, and writes all files."""
    while rig.kv.has_copies or rig.in_flight is not None:
        rig.turn()
    if rig.kv.tiers._storage is not None:
        rig.kv.tiers._storage.close(PATIENCE_S)
    rig.kv.audit([])


def rig_on_a_silent_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> Rig:
    """A new engine after one that has written the KV of a prompt. It finds the files, and no read is ever answered."""
    rig = Rig(page_size=4, host_blocks=64, storage=folder)
    ask(rig, "a", ids)
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=64, storage=folder)
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", lambda job: None)
    return fresh


def settle_copies(rig: Rig) -> None:
    """As `settle`, but the thread goes on."""
    while rig.kv.has_copies or rig.in_flight is not None:
        rig.turn()
    tiers = rig.kv.tiers
    while tiers._writing:
        jobs = tiers._storage.poll(PATIENCE_S)
        assert jobs
        tiers._collect(jobs)


def forget_pool(rig: Rig) -> None:
    """Makes the copies of all KV of the pool, and evicts it."""
    settle_copies(rig)
    rig.kv.cache.evict(512)
