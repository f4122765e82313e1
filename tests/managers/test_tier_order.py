"""What the tiers below the KV pool keep when they are full, and what the scheduler looks up in them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from kv_makers import admit, make_req
from random_steps.scheduler_case import WaitingBound
from scheduler_rig import Rig
from tier_asks import CountingDict, ask, forget_pool, keys_of, prompt, rig_on_a_silent_disk, settle, settle_copies

from tercet.managers import kv_tiers
from tercet.managers.req import Stage
from tercet.managers.schedule_policy import MAX_PASSED_OVER
from tercet.mem_cache import kv_folder
from tercet.mem_cache.kv_folder import file_name, use_time_ns
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.pause_messages import ContinueReq, PauseReq


def kept_keys(rig: Rig) -> list[bytes | None]:
    """Of the blocks of host memory, the least recently used first."""
    return [rig.kv.tiers.blocks._key_of[block] for block in rig.kv.tiers.blocks._kept]


def test_a_full_host_memory_loses_a_prefix_from_its_end() -> None:
    """A prompt has five blocks of 8 tokens, and host memory has five blocks."""
    rig = Rig(page_size=4, host_blocks=5)
    ask(rig, "a", prompt(1, 41))
    forget_pool(rig)
    ask(rig, "b", prompt(2, 9))
    forget_pool(rig)
    assert ask(rig, "c", prompt(1, 41)) == (32, 32, 0)


def test_a_prefix_does_not_displace_itself() -> None:
    rig = Rig(page_size=4, host_blocks=4)
    ask(rig, "a", prompt(1, 41))
    for rid in "bcd":
        forget_pool(rig)
        assert ask(rig, rid, prompt(1, 41)) == (32, 32, 0)


@pytest.mark.parametrize("has_files", [False, True])
def test_the_start_of_a_prefix_is_as_recent_as_its_end(tmp_path: Path, has_files: bool) -> None:
    """The second turn of a conversation finds three blocks and adds two. The third adds none."""
    rig = Rig(page_size=4, host_blocks=6, storage=tmp_path if has_files else None)
    ask(rig, "a", prompt(1, 25))
    for rid in "bc":
        forget_pool(rig)
        ask(rig, rid, prompt(1, 41))
        settle_copies(rig)
        assert kept_keys(rig) == keys_of(prompt(1, 41))[::-1]


@pytest.mark.parametrize("num_before", [0, 2])
def test_blocks_that_are_read_go_from_the_end(tmp_path: Path, num_before: int) -> None:
    """And before those that precede them in host memory."""
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=5, storage=tmp_path)
    if num_before:
        ask(fresh, "b", prompt(1, 8 * num_before + 1))
        forget_pool(fresh)
    fresh.add("c", prompt(1, 41))
    fresh.turn()
    fresh.abort("c")
    while fresh.kv.tiers._reading:  # a thread that ends leaves out what it has not begun to read
        fresh.kv.tiers.wait()
    settle(fresh)
    assert kept_keys(fresh) == keys_of(prompt(1, 41))[::-1]


def test_blocks_that_are_loaded_go_from_the_end() -> None:
    """Also if the request that loads them gets no token."""
    rig = Rig(page_size=4, host_blocks=64)
    ask(rig, "a", prompt(1, 41))
    forget_pool(rig)
    rig.add("b", prompt(1, 41))
    rig.turn()
    rig.abort("b")
    rig.run()
    assert rig.kv.tiers.counts.num_loaded == 10
    assert kept_keys(rig) == keys_of(prompt(1, 41))[::-1]


@pytest.mark.parametrize("missing", [range(5), range(3, 5), range(2)])
def test_blocks_that_are_written_again_go_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: range
) -> None:
    """Also before those that have files. So do the files."""
    monkeypatch.setattr(kv_folder, "time", SimpleNamespace(time_ns=lambda: 10**18))
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle_copies(rig)
    keys = keys_of(prompt(1, 41))
    for index in missing:
        (tmp_path / file_name(keys[index])).unlink()  # as another server does that needs the space
    rig.kv.tiers._storage.files.look()
    ask(rig, "b", prompt(1, 41))
    settle_copies(rig)
    assert kept_keys(rig) == keys[::-1]
    times = [(tmp_path / file_name(key)).stat().st_mtime_ns for key in keys]
    assert times == [use_time_ns(index) for index in range(5)] == sorted(times, reverse=True)
    settle(rig)


@pytest.mark.parametrize("place", ["pool", "host memory"])
def test_a_use_renews_the_files_without_a_read(tmp_path: Path, place: str) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    storage = rig.kv.tiers._storage
    ask(rig, "a", prompt(1, 41))
    settle_copies(rig)
    paths = [tmp_path / file_name(key) for key in keys_of(prompt(1, 41))]
    for path in paths:
        os.utime(path, (0, 0))
    storage.files._known = dict.fromkeys(storage.files._known, 0)
    if place == "host memory":
        rig.kv.cache.evict(512)
    assert ask(rig, "b", prompt(1, 41)) == (40, 0 if place == "pool" else 40, 0)
    settle(rig)
    times = [path.stat().st_mtime_ns for path in paths]
    assert len(times) == 5 and times == sorted(times, reverse=True) and len(set(times)) == 5 and times[-1] > 0


def test_a_missing_file_is_written_anew_from_host_memory(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first = prompt(1, 41)
    ask(rig, "a", first)
    settle_copies(rig)
    for path in sorted(tmp_path.glob("*.kv"))[:3]:
        path.unlink()  # as another server does that needs the space
    rig.kv.tiers._storage.files.look()
    assert ask(rig, "b", first) == (40, 0, 0)
    settle(rig)
    assert ask(Rig(page_size=4, host_blocks=64, storage=tmp_path), "c", first) == (40, 0, 40)


def test_a_block_that_the_pool_has_in_part_is_loaded_and_counted_in_part() -> None:
    """A page has 4 tokens, and a block 8. The pool keeps three pages."""
    rig = Rig(page_size=4, host_blocks=64)
    ask(rig, "a", prompt(1, 41))
    forget_pool(rig)
    assert ask(rig, "b", prompt(1, 13)) == (8, 8, 0)
    assert ask(rig, "c", prompt(1, 41)) == (40, 28, 0)


def test_only_tokens_of_the_prompt_count_as_cached() -> None:
    """A stream that is continued after a restart of the server begins with output."""
    rig = Rig(page_size=4, host_blocks=64)
    ask(rig, "a", prompt(1, 41))
    forget_pool(rig)
    req = make_req(prompt(1, 20), output=prompt(1, 41)[20:])
    admit(rig.kv, req)
    assert (req.num_tokens, req.kv_len, req.host_tokens, req.storage_tokens) == (41, 40, 20, 0)


def test_what_a_retracted_request_finds_again_does_not_count_as_cached() -> None:
    rig = Rig(page_size=4, host_blocks=64)
    ask(rig, "a", prompt(1, 41))
    forget_pool(rig)
    rig.add("b", prompt(1, 41), max_new_tokens=6)
    rig.turn()
    (req,) = rig.scheduler.queues.running
    rig.inbox.messages.append(PauseReq(0, True))
    while req.stage is not Stage.WAITING:
        rig.turn()
    rig.kv.cache.evict(512)
    rig.inbox.messages.append(ContinueReq(0))
    rig.run()
    assert rig.kv.tiers.counts.num_loaded == 2 * 10
    counts = rig.heard["b"].last.counts
    assert (counts.cached_tokens, counts.host_tokens) == (40, 40)


def test_what_a_policy_expects_follows_the_pool() -> None:
    tiers, req = Rig(page_size=4, host_blocks=64).kv.tiers, make_req(prompt(1, 41))
    for start in (24, 12, 40, 0):
        assert tiers.expected_end(req, start) == start


def test_what_a_policy_expects_follows_the_output() -> None:
    """A step that was in flight may return a token after the retraction."""
    rig = Rig(page_size=4, host_blocks=64)
    ask(rig, "a", prompt(1, 41))
    forget_pool(rig)
    req = make_req(prompt(1, 20))
    assert rig.kv.match_len(req) == 16
    req.output_ids += prompt(1, 41)[20:]
    assert rig.kv.match_len(req) == 40


def num_that_pass_a_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many later arrivals go before a request whose files are never read, in twice the time that it may wait."""
    rig = Rig(page_size=4, host_blocks=64, storage=folder)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=64, storage=folder, max_running=1)
    ask(fresh, "warm", prompt(2, 61))
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", lambda job: None)  # a disk that never answers
    fresh.add("reads", prompt(1, 41), max_new_tokens=1)
    bound = WaitingBound(fresh)
    for index in range(400):
        if len(fresh.scheduler.queues.waiting) < 4:  # a long queue would not be sorted
            fresh.add(f"warm{index}", [*prompt(2, 60), index % 97], max_new_tokens=1)
        fresh.turn()
        bound.check()
        fresh.clock.now += 0.01
    return [rid for rid in [*fresh.heard, "reads"] if rid != "warm"].index("reads")


def test_others_pass_a_read_for_a_limited_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2 s, of two turns of 0.01 s for each, more pass it than otherwise any request. The check allows that."""
    assert kv_tiers.READ_TIMEOUT_S == 2.0
    assert 3 * MAX_PASSED_OVER < num_that_pass_a_read(tmp_path, monkeypatch) <= 101


@pytest.mark.parametrize(
    ("page_size", "length", "num_read"), [(8, 8, 0), (8, 16, 1), (8, 17, 2), (4, 8, 1), (4, 16, 2), (4, 23, 2)]
)
def test_only_blocks_that_an_admission_can_load_are_read(
    tmp_path: Path, page_size: int, length: int, num_read: int
) -> None:
    """A block has 8 tokens. The last token of a prompt is always computed."""
    ids = prompt(1, 41)
    for name, asked in (("a", ids), ("b", ids[:length])):
        rig = Rig(page_size=page_size, host_blocks=64, block_pages=8 // page_size, storage=tmp_path)
        cached = ask(rig, name, asked)
        settle(rig)
    loaded = min(8 * num_read, (length - 1) // page_size * page_size)
    assert cached == (loaded, 0, loaded) and rig.kv.tiers.counts.num_read == num_read


def test_a_request_that_computes_its_whole_prompt_waits_for_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = rig_on_a_silent_disk(tmp_path, monkeypatch, prompt(1, 41))
    fresh.add("scores", prompt(1, 41), logprobs=LogprobOptions(logprob_start_len=0))
    fresh.add("embeds", prompt(1, 41), pooling="mean", max_new_tokens=0)
    for _ in range(20):
        fresh.turn()
    assert not fresh.scheduler.queues.is_busy


def test_the_check_of_random_steps_notices_a_read_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "READ_TIMEOUT_S", 4.0)
    with pytest.raises(AssertionError, match="reads is starved"):
        num_that_pass_a_read(tmp_path, monkeypatch)


def test_a_policy_looks_up_a_block_once(tmp_path: Path) -> None:
    """Host memory has the first 16 of the 25 blocks, and files have all of them."""
    ids = prompt(1, 201)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", ids)
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=16, storage=tmp_path, max_running=1)
    ask(fresh, "b", ids[:129])
    settle_copies(fresh)
    fresh.kv.cache.evict(512)
    fresh.add("runs", prompt(5, 9), max_new_tokens=9)
    fresh.turn()
    fresh.add("waits", ids, max_new_tokens=1)
    fresh.turn()
    (req,) = fresh.scheduler.queues.waiting
    req.tiers = None  # the planner has not asked yet
    tiers = fresh.kv.tiers
    tiers.blocks._block_of = index = CountingDict(tiers.blocks._block_of)

    def num_looked_up() -> int:
        index.num_looked_up = 0
        assert fresh.kv.match_len(req) == 200
        return index.num_looked_up

    assert num_looked_up() >= 25 and num_looked_up() <= 1
    req.tiers.is_settled = True  # from now on, files do not count
    assert fresh.kv.match_len(req) == 128
    req.tiers.is_settled = False
    assert num_looked_up() >= 16
    keys = keys_of(ids)
    tiers._storage.files._forget(b"of another prompt")
    assert num_looked_up() <= 1, "the file of another prompt has gone"
    for gone in (20, 22):
        tiers._storage.files._forget(keys[gone])
    index.num_looked_up = 0
    assert fresh.kv.match_len(req) == 160 and index.num_looked_up <= 2
    tiers.blocks.clear()
    assert fresh.kv.match_len(req) == 160


def test_after_a_retraction_more_of_a_prompt_may_be_reused() -> None:
    """The log probabilities of its first chunk are computed."""
    ids = prompt(1, 41)
    rig = Rig(page_size=4, host_blocks=64, chunked_prefill_size=16)
    ask(rig, "a", ids)
    forget_pool(rig)
    rig.add("b", ids, max_new_tokens=4, logprobs=LogprobOptions(logprob_start_len=0))
    rig.turn()
    (req,) = rig.scheduler.queues.unfinished
    assert req.tiers.expected.end == 0
    rig.inbox.messages.append(PauseReq(0, True))
    while req.stage is not Stage.WAITING:
        rig.turn()
    forget_pool(rig)
    assert rig.kv.match_len(req) == 16
