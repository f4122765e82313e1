"""When the tiers read and write files: a read delays nobody too long, and only what is complete is written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from kv_makers import make_req
from patience import PATIENCE_S
from scheduler_rig import Rig
from tier_asks import ask, forget_pool, prompt, rig_on_a_silent_disk, settle, settle_copies

from tercet.mem_cache.block_keys import BlockKeys
from tercet.mem_cache.kv_folder import file_name


@pytest.mark.parametrize("is_good", [True, False])
def test_a_request_waits_for_one_read_and_no_turn_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_good: bool
) -> None:
    """Whatever else the scheduler does meanwhile. If the read fails, the file may be listed again, and fail again."""
    fresh = rig_on_a_silent_disk(tmp_path, monkeypatch, prompt(1, 41))
    fresh.add("b", prompt(1, 41))
    fresh.turn()
    (req,) = fresh.scheduler.queues.waiting
    tiers, storage = fresh.kv.tiers, fresh.kv.tiers._storage
    assert fresh.kv.awaits_storage(req) and fresh.kv.awaits_storage(req)
    monkeypatch.undo()
    if not is_good:
        monkeypatch.setattr(storage.files, "read", lambda key, target: False)
    storage.read(req.tiers.job)
    deadline_s = time.monotonic() + PATIENCE_S
    while not storage._done:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert not fresh.kv.awaits_storage(req) and not tiers._reading and req.tiers.is_settled
    assert req.tiers.job.num_read == (5 if is_good else 0)
    settle(fresh)


def test_a_damaged_file_of_another_prompt_costs_a_request_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts have the same beginning, so both requests wait for the read of the first one."""
    first = prompt(1, 41)
    second = [*first[:16], *prompt(2, 25)]
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    for rid, ids in (("a", first), ("b", second)):
        ask(rig, rid, ids)
    settle(rig)
    third = BlockKeys(b"fake", "", 8).cover(np.array(first, np.int32))[2]
    (tmp_path / file_name(third)).write_bytes(b"damaged")
    fresh, held = Rig(page_size=4, host_blocks=64, storage=tmp_path), []
    with monkeypatch.context() as patch:
        patch.setattr(fresh.kv.tiers._storage, "read", held.append)
        fresh.add("c", first, max_new_tokens=1)
        fresh.add("d", second, max_new_tokens=1)
        fresh.turn()
    (job,) = held
    fresh.kv.tiers._storage.read(job)
    fresh.run()
    assert [fresh.heard[rid].last.counts.cached_tokens for rid in "cd"] == [16, 40]
    settle(fresh)


def test_a_read_does_not_displace_the_blocks_before_it(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 49))
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=4, storage=tmp_path)
    ask(fresh, "b", prompt(1, 17))
    forget_pool(fresh)
    assert ask(fresh, "c", prompt(1, 49)) == (32, 16, 16)
    settle(fresh)


def test_a_read_is_a_use_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may be aborted before its release counts as one."""
    fresh, uses = rig_on_a_silent_disk(tmp_path, monkeypatch, prompt(1, 41)), []
    monkeypatch.setattr(fresh.kv.tiers._storage, "use", uses.append)
    fresh.add("b", prompt(1, 41))
    fresh.turn()
    assert uses == [BlockKeys(b"fake", "", 8).cover(np.array(prompt(1, 41), np.int32))]


def test_what_files_have_takes_no_host_memory(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle_copies(rig)
    rig.kv.tiers.blocks.clear()  # as if others had taken it
    assert ask(rig, "b", prompt(1, 41)) == (40, 0, 0)
    assert rig.kv.tiers.counts.num_saved == 5 and rig.kv.tiers.blocks.num_free == 64
    settle(rig)


def test_no_block_is_written_before_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal requests end in one turn. The second one finds the blocks of the first, which are still empty."""
    rig, jobs = Rig(page_size=4, host_blocks=64, storage=tmp_path), []
    storage = rig.kv.tiers._storage
    write = storage.write
    monkeypatch.setattr(storage, "write", lambda job: jobs.append(job.key) or write(job))
    for rid in "ab":
        rig.add(rid, prompt(1, 41), max_new_tokens=4)
    rig.run()
    assert rig.heard["a"].finish is not None and rig.heard["b"].finish is not None
    assert rig.kv.has_copies and not jobs
    settle(rig)
    assert sorted(jobs) == sorted(BlockKeys(b"fake", "", 8).cover(np.array(prompt(1, 41), np.int32)))
    assert ask(Rig(page_size=4, host_blocks=64, storage=tmp_path), "c", prompt(1, 41)) == (40, 0, 40)


def test_a_busy_scheduler_takes_blocks_again_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, jobs = Rig(page_size=4, host_blocks=5, storage=tmp_path), []
    tiers, storage = rig.kv.tiers, rig.kv.tiers._storage
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", jobs.append)
        ask(rig, "a", prompt(1, 41))
        while rig.kv.has_copies or rig.in_flight is not None:
            rig.turn()
    assert len(jobs) == 5 and tiers._take() is None
    for job in jobs:
        storage.write(job)
    deadline_s = time.monotonic() + PATIENCE_S
    while len(storage._done) < 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    block = tiers._take()
    assert block is not None
    tiers.blocks.unpin(block)
    settle(rig)


def test_a_request_without_files_does_not_wait(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    req = make_req(prompt(2, 41))
    assert not rig.kv.awaits_storage(req) and req.tiers.is_settled
    other = make_req(prompt(1, 41))
    rig.kv.cache.evict(512)
    assert not rig.kv.awaits_storage(other), "host memory has it"
    rig.kv.tiers.wait()
