"""When the tiers read and write files: a read delays nobody too long, and only what is complete is written."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from kv_event_reader import DISK, HOST
from kv_makers import admit, extend, make_req
from patience import PATIENCE_S
from scheduler_rig import Rig
from tier_asks import VOCAB, ask, forget_pool, keys_of, prompt, rig_on_a_silent_disk, settle, settle_copies
from tier_reader import TierReader

from fakes import expected_output
from tercet.managers import kv_tiers
from tercet.managers.req import Stage
from tercet.mem_cache.kv_folder import file_name
from tercet.srt.io_struct import LengthFinish
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.pause_messages import ContinueReq, PauseReq


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
    assert not req.tiers.awaits_files
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
    third = keys_of(first)[2]
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


def test_a_read_of_later_blocks_delays_no_read_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is read twice."""
    ids = prompt(1, 41)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", ids)
    settle(rig)
    fresh, held = Rig(page_size=4, host_blocks=64, storage=tmp_path), []
    ask(fresh, "b", ids[:9])
    fresh.kv.tiers.blocks.clear()  # only the pool has the first block
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", held.append)
    fresh.add("c", ids, max_new_tokens=1)
    fresh.turn()
    fresh.kv.cache.evict(512)
    fresh.add("d", ids, max_new_tokens=1)
    fresh.turn()
    keys = keys_of(ids)
    assert [[key for key, _ in job.blocks] for job in held] == [keys[1:], keys[:1]]
    monkeypatch.undo()
    for job in held:
        fresh.kv.tiers._storage.read(job)
    fresh.run()
    assert [fresh.heard[rid].last.counts.cached_tokens for rid in "cd"] == [40, 40]
    settle(fresh)


def test_a_gap_in_host_memory_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of both reads count as from files."""
    ids = prompt(1, 41)
    keys = keys_of(ids)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", ids)
    settle(rig)
    fresh, reads = Rig(page_size=4, host_blocks=5, storage=tmp_path), []
    ask(fresh, "b", ids[:25])
    forget_pool(fresh)
    blocks, storage = fresh.kv.tiers.blocks, fresh.kv.tiers._storage
    blocks.touch([keys[0], keys[2]])
    for block in [blocks.take() for _ in range(3)]:  # the third one had the second key
        blocks.unpin(block)
    assert [blocks.find(key) is None for key in keys[:3]] == [False, True, False]
    read = storage.read
    monkeypatch.setattr(storage, "read", lambda job: reads.append(job) or read(job))
    assert ask(fresh, "c", ids) == (40, 16, 24)
    assert [[key for key, _ in job.blocks] for job in reads] == [keys[1:2], keys[3:]]
    settle(fresh)


def test_readers_of_events_learn_of_a_file_when_a_request_has_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file does not say what its key stands for, and is not read in time."""
    ids = prompt(1, 41)
    fresh = rig_on_a_silent_disk(tmp_path, monkeypatch, ids)
    monkeypatch.setattr(fresh.kv.tiers._storage.files, "content", lambda key: None)
    known = TierReader(fresh.kv)
    fresh.add("b", ids)
    fresh.turn()
    fresh.clock.now += kv_tiers.READ_TIMEOUT_S
    known.read()
    assert not known.keys_in(DISK)
    fresh.run()
    known.read()
    assert known.keys_in(DISK) == set(keys_of(ids))


def test_a_retracted_request_may_wait_for_files_again(tmp_path: Path) -> None:
    """Its first read has ended at a damaged file, and the time for it is over."""
    ids = prompt(1, 41)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", ids)
    settle(rig)
    (tmp_path / file_name(keys_of(ids)[2])).write_bytes(b"damaged")
    fresh = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    fresh.add("b", ids)
    while not fresh.scheduler.queues.running:
        fresh.turn()
    (req,) = fresh.scheduler.queues.running
    assert fresh.kv.tiers.counts.num_read == 2
    fresh.clock.now += kv_tiers.READ_TIMEOUT_S
    fresh.inbox.messages.append(PauseReq(0, True))
    while req.stage is not Stage.WAITING:
        fresh.turn()
    fresh.kv.cache.evict(512)
    fresh.kv.tiers.blocks.clear()  # as if others had taken it
    fresh.inbox.messages.append(ContinueReq(0))
    fresh.run()
    assert fresh.kv.tiers.counts.num_read > 2
    assert fresh.heard["b"].ids == expected_output(ids, 1, 8, VOCAB)
    settle(fresh)


def test_only_what_was_read_counts_as_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request computes the rest meanwhile."""
    ids = prompt(1, 41)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", ids)
    settle(rig)
    fresh, held = Rig(page_size=4, host_blocks=64, storage=tmp_path), []
    storage = fresh.kv.tiers._storage
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read", held.append)
        fresh.add("c", ids)
        fresh.turn()
    for key in keys_of(ids)[2:]:
        (tmp_path / file_name(key)).unlink()
    storage.files.look()
    storage.files._retry_s = math.inf  # they are not written again
    fresh.add("d", ids, logprobs=LogprobOptions(logprob_start_len=0))
    while fresh.heard["d"].finish is None:
        fresh.turn()
    forget_pool(fresh)
    (job,) = held
    storage.read(job)
    fresh.run()
    counts = fresh.heard["c"].last.counts
    assert (counts.cached_tokens, counts.host_tokens, counts.storage_tokens) == (40, 24, 16)
    settle(fresh)


def test_readers_of_events_know_of_a_read_that_continues_what_host_memory_has(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=8, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=8, storage=tmp_path)
    known = TierReader(fresh.kv)
    ask(fresh, "b", prompt(1, 17))
    forget_pool(fresh)
    assert ask(fresh, "c", prompt(1, 41)) == (40, 16, 24)
    known.read()
    assert len(known.keys_in(HOST)) == 5
    known.check_host()
    assert not fresh.kv.tiers._events._reading
    settle(fresh)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_read_does_not_displace_the_blocks_before_it(tmp_path: Path, is_full: bool) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 49))
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=4, storage=tmp_path)
    ask(fresh, "b", prompt(1, 17))
    forget_pool(fresh)
    if is_full:  # the blocks of another prompt were used later
        ask(fresh, "other", prompt(2, 17))
        forget_pool(fresh)
    assert ask(fresh, "c", prompt(1, 49)) == (32, 16, 16)
    assert fresh.kv.tiers.counts.num_read == 4
    settle(fresh)


@pytest.mark.parametrize("place", ["files", "host memory", "pool"])
def test_a_read_is_a_use_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The request may be aborted before its release counts as one. `place`: what has the first two of its blocks."""
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    fresh, uses, reads = Rig(page_size=4, host_blocks=64, storage=tmp_path), [], []
    if place != "files":
        ask(fresh, "b", prompt(1, 17))
    if place == "host memory":
        forget_pool(fresh)
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", reads.append)
    monkeypatch.setattr(fresh.kv.tiers._storage, "use", uses.append)
    fresh.add("c", prompt(1, 41))
    fresh.turn()
    keys = keys_of(prompt(1, 41))
    assert uses == [keys]
    assert [key for job in reads for key, _ in job.blocks] == keys[0 if place == "files" else 2 :]


def test_what_files_have_takes_no_host_memory(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle_copies(rig)
    rig.kv.tiers.blocks.clear()  # as if others had taken it
    assert ask(rig, "b", prompt(1, 41)) == (40, 0, 0)
    assert rig.kv.tiers.counts.num_saved == 5 and rig.kv.tiers.blocks.num_free == 64
    settle(rig)


@pytest.mark.parametrize(
    ("num_output", "num_computed", "num_unchecked", "num_saved"),
    [(4, 24, 0, 2), (5, 24, 0, 3), (5, 25, 0, 3), (5, 25, 1, 2), (5, 20, 0, 2), (0, 24, 0, 3), (0, 23, 0, 2)],
)
def test_only_kv_that_has_given_finite_logits_is_saved(
    num_output: int, num_computed: int, num_unchecked: int, num_saved: int
) -> None:
    """A block has 8 tokens. The step of the newest token may be in flight. A request without output has ended well."""
    ids = prompt(1, 25)
    kv = Rig(page_size=4, host_blocks=64).kv
    req = make_req(ids[: 20 if num_output else 24])
    admit(kv, req)
    extend(kv, req, num_computed)
    req.output_ids += ids[20 : 20 + num_output]
    req.num_unchecked = num_unchecked
    req.finish = LengthFinish(num_output)
    kv.release(req)
    assert kv.tiers.counts.num_saved == num_saved


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
    assert sorted(jobs) == sorted(keys_of(prompt(1, 41)))
    assert ask(Rig(page_size=4, host_blocks=64, storage=tmp_path), "c", prompt(1, 41)) == (40, 0, 40)


def test_only_what_has_no_file_and_may_get_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, jobs = Rig(page_size=4, host_blocks=64, storage=tmp_path), []
    storage = rig.kv.tiers._storage
    write = storage.write
    monkeypatch.setattr(storage, "write", lambda job: jobs.append(job.key) or write(job))
    for rid in "ab":
        ask(rig, rid, prompt(1, 41))
        settle_copies(rig)
    assert len(jobs) == 5
    storage.files._retry_s = math.inf  # as after a write that has failed
    ask(rig, "c", prompt(2, 41))
    settle_copies(rig)
    for path in tmp_path.iterdir():
        path.unlink()  # as another server does that needs the space
    storage.files.look()
    ask(rig, "d", prompt(1, 41))
    settle(rig)
    assert len(jobs) == 5 and rig.kv.tiers.counts.num_saved == 10


def test_what_another_server_has_written_meanwhile_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of the request and the step that copies its KV."""
    rigs, jobs = [Rig(page_size=4, host_blocks=64, storage=tmp_path) for _ in range(2)], []
    for rig in rigs:
        ask(rig, "a", prompt(1, 41))
        assert rig.kv.has_copies
    settle(rigs[0])
    storage = rigs[1].kv.tiers._storage
    monkeypatch.setattr(storage, "write", jobs.append)
    storage.files.look()
    settle(rigs[1])
    assert not jobs and rigs[1].kv.tiers.blocks.num_kept == 5


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


def test_a_turn_that_only_waits_for_a_read_takes_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the scheduler would take a whole core until the read has ended."""
    fresh, waits = rig_on_a_silent_disk(tmp_path, monkeypatch, prompt(1, 41)), []
    monkeypatch.setattr(fresh.kv.tiers._storage, "poll", lambda timeout_s=0.0: waits.append(timeout_s) or [])
    fresh.kv.wait_for_storage()
    assert not waits, "nothing is read"
    fresh.add("b", prompt(1, 41))
    fresh.turn()
    assert max(waits) > 0


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


def test_what_a_read_brings_after_a_flush_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    tiers, held = fresh.kv.tiers, []
    read = tiers._storage.read
    monkeypatch.setattr(tiers._storage, "read", held.append)
    fresh.add("b", prompt(1, 41))
    fresh.turn()
    fresh.abort("b")
    fresh.run()
    fresh.kv.flush()
    (job,) = held
    read(job)
    tiers._collect(tiers._storage.poll(PATIENCE_S))
    assert job.num_read == 5 and tiers.blocks.num_free == 64


def test_an_audit_finds_a_pin_without_a_reason() -> None:
    tiers = Rig(page_size=4, host_blocks=4).kv.tiers
    tiers.blocks.take()
    with pytest.raises(AssertionError, match="1 pins of host blocks, but 0 reasons"):
        tiers.audit()
    tiers.rebuild()
    tiers.audit()
