"""The books of the KV pool, of host memory and of steps, added up anew and independently of the code under test."""

from __future__ import annotations

from typing import Any

import numpy as np
from random_steps.files import FakeStorage

from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.kv_tiers import KVTiers
from tercet.managers.req import Req
from tercet.mem_cache.kv_storage import WriteJob
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.radix_node import RadixNode
from tercet.mem_cache.recurrent_cache import RecurrentCache
from tercet.model_executor.step import StepInputs
from tercet.srt.settings.scheduler import MAX_VERIFIED_TOKENS


def cached_slots(cache: RadixCache) -> np.ndarray:
    """int32 [n]: all slots that a request could find."""
    return np.concatenate([np.empty(0, np.int32), *(node.slots for node in nodes_of(cache))])


def nodes_of(cache: RadixCache) -> list[RadixNode]:
    """The nodes of the tree without its root, parents before their children."""
    found, level = [], [cache._root]
    while level:
        level = [child for node in level for child in node.children.values()]
        found += level
    return found


def check_owners(kv: KVCacheManager, holders: list[Req]) -> None:
    """Raises AssertionError unless each slot of the pool has exactly one owner, and the counts of owners are right."""
    assert isinstance(kv.cache, RadixCache)
    page = kv.page_size
    nodes = [*nodes_of(kv.cache), *kv.cache._discarded]
    cached = [node.slots for node in nodes]
    num_cached = sum(map(len, cached))
    num_locked = sum(len(node.slots) for node in nodes if node.lock_count)
    assert kv.cache.protected_size == num_locked and kv.cache.evictable_size == num_cached - num_locked
    free = kv.allocator._free
    private = [kv._table[req.row, req.locked_len : req.kv_len] for req in holders]
    pages = np.concatenate([slots[::page] // page for slots in (*cached, *private)] + list(free.slices()))
    pages.sort()
    num_pages = kv.allocator.size // page
    assert len(pages) == num_pages and (pages == np.arange(1, num_pages + 1)).all(), "a slot has no owner, or two"
    assert kv.allocator.num_free == sum(map(len, free.slices())) * page
    rows = [req.row for req in holders]
    assert 0 not in rows and len(set(rows)) == len(rows)
    assert kv.req_to_token_pool.num_free + len(rows) == kv.req_to_token_pool.num_rows
    if isinstance(kv.cache, RecurrentCache):
        _check_states(kv.cache, nodes, holders)


def _check_states(cache: RecurrentCache, nodes: list[RadixNode], holders: list[Req]) -> None:
    assert cache._row_of.keys() <= set(nodes), "a state of no prefix is kept"
    taken = [req.states.row for req in holders if req.states is not None and req.states.row is not None]
    rows = [*cache._row_of.values(), *cache._free_rows, *taken]
    assert sorted(rows) == list(cache._all_rows), "a row for saved states has no owner, or two"


def check_host_blocks(tiers: KVTiers, storage: FakeStorage | None) -> None:
    """Raises AssertionError unless each host block is free, kept for a key, or used by the copies and jobs that pin it.

    `storage`: that of `tiers`.
    """
    uses: list[int] = []
    for copies in [tiers._next, *tiers._under_way]:
        uses += copies.blocks
    for job in [] if storage is None else storage.jobs:
        uses += [job.block] if isinstance(job, WriteJob) else [block for _, block in job.blocks]
    blocks = tiers.blocks
    num_uses = [0] * blocks.num_blocks
    for block in uses:
        num_uses[block] += 1
    assert num_uses == blocks._pins, "a host block has other users"
    owned = sorted([*blocks._free, *blocks._kept, *set(uses)])
    assert owned == list(range(blocks.num_blocks)), "a host block has no owner, or two"
    assert all(blocks._key_of[block] is not None for block in blocks._kept), "a host block is kept for nobody"
    assert not any(blocks._key_of[block] for block in blocks._free)


def check_limits(step: StepInputs, rig: dict[str, Any]) -> None:
    """Raises AssertionError if a step has more tokens than the settings of the engine allow. `rig`: those of a Case.

    A step of many decodes has room for a page of prompts beside them.
    """
    if step.extend_lens is None:
        return
    assert step.extend_lens.min() > 0
    most = max(rig["max_prefill_tokens"], rig["page_size"] + len(step.rows) - 1)
    if step.num_drafts is not None:
        most = max(rig["max_prefill_tokens"], MAX_VERIFIED_TOKENS)
    assert step.extend_lens.sum() <= most, "a step has too many tokens"
    if not rig["joins_forced"] and step.num_drafts is None:  # forced tokens are no chunk
        assert step.extend_lens.max() <= rig["chunked_prefill_size"], "a chunk is too long"
