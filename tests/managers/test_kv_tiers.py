"""The tiers below the KV pool, in a whole scheduler: nothing is lost or leaked, and no token depends on them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from scheduler_rig import Rig
from tier_asks import VOCAB, ask, prompt, rig_on_a_silent_disk, settle, settle_copies

from fakes import expected_output
from tercet.managers import kv_tiers
from tercet.mem_cache import kv_files, kv_folder
from tercet.mem_cache.block_keys import BlockKeys
from tercet.mem_cache.kv_files import KVFiles
from tercet.srt.io_struct import AbortFinish, FlushCacheReply, FlushCacheReq
from tercet.srt.pause_messages import ContinueReq, PauseReply, PauseReq


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_evicted_prefix_comes_back_from_host_memory(page_size: int, overlap: bool) -> None:
    rig = Rig(pool_size=64, page_size=page_size, host_blocks=64, block_pages=2, overlap=overlap)
    first = prompt(1, 40)
    assert ask(rig, "a", first) == (0, 0, 0)
    ask(rig, "b", prompt(2, 56))  # evicts it
    assert rig.kv.cache.match_len(np.array(first, np.int32)) < 40
    cached, host, storage = ask(rig, "c", first)
    assert (cached, storage) == (39 // page_size * page_size, 0)
    assert host >= cached - 64 + 57
    computed = sum(len(step.input_ids) for step in rig.runner.steps[-5:] if step.input_ids is not None)
    assert computed == 40 - cached


def test_files_survive_a_restart_and_namespaces_stay_apart(tmp_path: Path) -> None:
    first = prompt(1, 41)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", first, salt="x")
    settle(rig)
    for salt, expected in (("y", (0, 0, 0)), ("x", (40, 0, 40)), ("", (0, 0, 0))):
        fresh = Rig(page_size=4, host_blocks=64, storage=tmp_path)
        assert ask(fresh, "b", first, salt=salt) == expected
    # In the same engine: from the pool, and after a flush from the files.
    assert ask(rig, "b", first, salt="x") == (40, 0, 0)
    rig.kv.flush()
    assert rig.kv.tiers.blocks.num_free == 64
    fresh.kv.flush()


def test_a_scheduler_that_stops_writes_what_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "CLOSE_TIMEOUT_S", PATIENCE_S)
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first = prompt(1, 41)
    ask(rig, "a", first)
    assert rig.kv.has_copies and not list(tmp_path.iterdir())
    rig.scheduler.run(lambda: True)
    assert ask(Rig(page_size=4, host_blocks=64, storage=tmp_path), "b", first) == (40, 0, 40)


@pytest.mark.parametrize("policy", ["lpm", "dlpm", "shortest-prefill-first", "hrrn"])
def test_a_policy_counts_what_host_memory_has(policy: str) -> None:
    first = prompt(1, 41)
    rig = Rig(page_size=4, host_blocks=64, policy=policy, max_running=1)
    ask(rig, "a", first)
    settle(rig)
    rig.kv.cache.evict(512)
    rig.add("runs", prompt(5, 9), max_new_tokens=4)
    rig.add("cold", prompt(2, 41), max_new_tokens=1)
    rig.add("warm", first, max_new_tokens=1)
    rig.turn()
    rig.clock.now += 1.0
    rig.run()
    assert [rid for rid in rig.heard if rid in ("cold", "warm")] == ["warm", "cold"]
    assert rig.heard["warm"].last.counts.host_tokens == 40


def test_files_count_as_cached_until_a_request_has_waited_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = rig_on_a_silent_disk(tmp_path, monkeypatch, prompt(1, 41))
    fresh.add("b", prompt(1, 41), max_new_tokens=1)
    fresh.turn()
    (req,) = fresh.scheduler.queues.waiting
    assert fresh.kv.match_len(req) == req.matched_len == 40 and fresh.kv.device_match_len(req) == 0
    fresh.clock.now += kv_tiers.READ_TIMEOUT_S
    assert not fresh.kv.awaits_storage(req)
    assert fresh.kv.match_len(req) == 0


def test_a_flush_during_a_pause_loses_no_file(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first = prompt(1, 41)
    ask(rig, "a", first)
    assert rig.kv.has_copies
    rig.inbox.messages += [PauseReq(1, False), FlushCacheReq(2)]
    rig.turn()
    assert rig.tokenizer.messages[-2:] == [FlushCacheReply(2, 0), PauseReply(1)]
    assert rig.kv.allocator.num_free == rig.kv.allocator.size
    rig.inbox.messages.append(ContinueReq(3))
    rig.add("other", prompt(2, 240), max_new_tokens=1)  # takes the same slots in the step that copies
    rig.run()
    assert rig.heard["other"].ids == expected_output(prompt(2, 240), 1, 1, VOCAB)
    settle(rig)
    assert ask(Rig(page_size=4, host_blocks=64, storage=tmp_path), "b", first) == (40, 0, 40)


def test_a_flush_without_files_drops_the_copies() -> None:
    rig = Rig(page_size=4, host_blocks=64)
    ask(rig, "a", prompt(1, 41))
    assert rig.kv.has_copies
    rig.kv.flush()
    assert not rig.kv.has_copies and rig.kv.tiers.blocks.num_free == 64


def test_a_rebuilt_pool_saves_nothing(tmp_path: Path) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    rig.kv.rebuild()
    assert not rig.kv.has_copies
    settle(rig)
    assert not list(tmp_path.glob("*.kv"))


def test_the_next_turn_of_a_conversation_finds_the_output_too(tmp_path: Path) -> None:
    rig = Rig(page_size=1, host_blocks=64, block_pages=4, storage=tmp_path)
    first = prompt(3, 21)
    ask(rig, "a", first, 12)
    settle(rig)
    longer = first + rig.heard["a"].ids + prompt(4, 9)
    fresh = Rig(page_size=1, host_blocks=64, block_pages=4, storage=tmp_path)
    assert ask(fresh, "b", longer) == (32, 0, 32)  # 21 + 12 tokens, less the last one, in whole blocks


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"x",
    "one bit of the tokens": lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
    "one bit of the data": lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "another key": lambda content: content[:30] + bytes([content[30] ^ 1]) + content[31:],
    "another format": lambda content: b"X" + content[1:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_costs_one_line_and_its_tokens(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first = prompt(1, 41)
    ask(rig, "a", first)
    settle(rig)
    third = BlockKeys(b"fake", "", 8).cover(np.array(first, np.int32))[2]
    (path,) = tmp_path.glob(f"*{third.hex()}*")
    content = path.read_bytes()
    path.write_bytes(DAMAGES[damage](content))
    fresh = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    with caplog.at_level(logging.WARNING):
        assert ask(fresh, "b", first) == (16, 0, 16)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert path.name in line.getMessage()
    settle(fresh)
    assert path.read_bytes() == content  # written anew
    assert ask(Rig(page_size=4, host_blocks=64, storage=tmp_path), "c", first) == (40, 0, 40)


def test_a_file_that_another_server_evicts_before_it_is_read_costs_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first = prompt(1, 41)
    ask(rig, "a", first)
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    read, held = fresh.kv.tiers._storage.read, []
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", held.append)
    fresh.add("b", first, max_new_tokens=4)
    fresh.turn()
    size = next(tmp_path.iterdir()).stat().st_size
    KVFiles(tmp_path, 4 * size)  # leaves three of five
    monkeypatch.undo()
    read(*held)
    fresh.run()
    assert fresh.heard["b"].ids == expected_output(first, 1, 4, VOCAB)
    assert fresh.heard["b"].last.counts.storage_tokens == 24
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    settle(fresh)


def test_servers_that_evict_each_others_files_answer_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder has room for the files of one prompt. A server learns of a loss when it reads or makes room."""
    rigs = [Rig(page_size=4, pool_size=64, host_blocks=4, storage=tmp_path, storage_bytes=2000) for _ in range(2)]
    for number in range(12):
        for rig in rigs:
            rig.add(f"r{number}", prompt(number % 3, 41), max_new_tokens=4)
        while any(f"r{number}" not in rig.heard or rig.heard[f"r{number}"].finish is None for rig in rigs):
            for rig in rigs:
                rig.turn()
        for rig in rigs:
            assert rig.heard[f"r{number}"].ids == expected_output(prompt(number % 3, 41), 1, 4, VOCAB)
    for rig in rigs:
        settle(rig)
    assert any(rig.kv.tiers.state().files.num_removed for rig in rigs)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_folder_that_becomes_read_only_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is written any more, and what is there is still read."""
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    ask(rig, "a", prompt(1, 41))
    settle(rig)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    fresh = Rig(page_size=4, pool_size=96, host_blocks=8, storage=tmp_path, storage_bytes=2000)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for target, name in ((kv_folder.tempfile, "mkstemp"), (os, "utime"), (os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(target, name, refuse)
    monkeypatch.setattr(kv_files, "_RETRY_S", 0.0)
    for number in range(2, 8):
        ask(fresh, f"r{number}", prompt(number, 41))
        settle_copies(fresh)
    assert ask(fresh, "b", prompt(1, 41)) == (40, 0, 40)
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Read-only file system" in record.getMessage()


def test_a_slow_disk_delays_a_request_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prompt(1, 41)
    fresh = rig_on_a_silent_disk(tmp_path, monkeypatch, first)
    fresh.add("b", first, max_new_tokens=4)
    fresh.add("other", prompt(9, 10), max_new_tokens=4)
    for _ in range(20):
        fresh.turn()
    assert fresh.heard["other"].finish is not None, "the others go on"
    assert not fresh.heard["b"].ids
    fresh.clock.now += kv_tiers.READ_TIMEOUT_S
    fresh.run()
    assert fresh.heard["b"].ids == expected_output(first, 1, 4, VOCAB)
    assert fresh.heard["b"].last.counts.cached_tokens == 0


def test_a_waiting_request_can_be_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    first = prompt(1, 41)
    ask(rig, "a", first)
    settle(rig)
    fresh = Rig(page_size=4, host_blocks=64, storage=tmp_path)
    read, held = fresh.kv.tiers._storage.read, []
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", held.append)
    fresh.add("b", first)
    fresh.turn()
    fresh.abort("b")
    fresh.run()
    assert isinstance(fresh.heard["b"].finish, AbortFinish)
    (job,) = held
    monkeypatch.undo()
    read(job)
    assert ask(fresh, "c", first)[0] == 40  # what was read for it serves others


def test_kv_without_a_finite_logit_is_never_saved() -> None:
    rig = Rig(page_size=1, host_blocks=64, block_pages=2, max_prefill_tokens=8, chunked_prefill_size=8)
    rig.runner.poison = 96
    ids = [value % 96 for value in prompt(5, 20)]
    rig.add("bad", [*ids[:9], 96, *ids[9:]], max_new_tokens=4)
    rig.run()
    assert isinstance(rig.heard["bad"].finish, AbortFinish)
    assert rig.kv.tiers.counts.num_saved == 0
    rig.add("aborted", ids, max_new_tokens=4)
    rig.turn()
    rig.turn()
    rig.abort("aborted")
    rig.run()
    assert rig.kv.tiers.counts.num_saved == 0, "no chunk of its prompt had logits"
    rig.add("zero", ids, max_new_tokens=0)
    rig.run()
    assert rig.kv.tiers.counts.num_saved == 10, "a prompt that was computed to warm the cache"


def test_the_state_counts_what_moved(tmp_path: Path) -> None:
    """A block has 8 tokens. A page of the fake pool has 3 numbers of 8 bytes for each token."""
    rig = Rig(pool_size=64, page_size=4, host_blocks=6, storage=tmp_path)
    assert ask(rig, "a", prompt(1, 41)) == (0, 0, 0)
    settle(rig)
    state = rig.scheduler.state().tiers
    assert (state.saved_tokens, state.saved_bytes, state.loaded_tokens) == (40, 40 * 24, 0)
    assert (state.host_used_tokens, state.host_total_tokens, state.dropped_tokens) == (40, 48, 0)
    assert (state.files.written_tokens, state.files.written_bytes, state.files.num_damaged) == (40, 40 * 24, 0)
    assert state.files.used_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    next(tmp_path.glob("*.kv")).write_bytes(b"damaged")
    fresh = Rig(pool_size=64, page_size=4, host_blocks=6, storage=tmp_path)
    cached, _, read = ask(fresh, "b", prompt(1, 41))
    ask(fresh, "c", prompt(2, 41))
    settle(fresh)
    state = fresh.scheduler.state().tiers
    assert state.files.read_tokens == state.loaded_tokens == cached == read < 40
    assert state.files.read_bytes == state.loaded_bytes == read * 24
    assert state.files.num_damaged == 1 and state.dropped_tokens > 0


prompts = st.tuples(st.integers(0, 2), st.integers(1, 60))
"""A prompt is the start of one of three long ones."""


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(prompts, st.integers(0, 12), st.sampled_from(["", "x"]), st.integers(0, 3)), min_size=1, max_size=14
    ),
    pool_pages=st.integers(20, 40),
    page_size=st.sampled_from([1, 4]),
    host_blocks=st.integers(1, 40),
    block_pages=st.integers(1, 3),
    overlap=st.booleans(),
    chunk=st.sampled_from([8, 16, 64]),
    has_files=st.booleans(),
    limit=st.sampled_from([1 << 10, 1 << 30]),
    aborts=st.sets(st.integers(0, 13), max_size=3),
    poison=st.booleans(),
)
def test_no_token_depends_on_the_tiers(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list,
    pool_pages: int,
    page_size: int,
    host_blocks: int,
    block_pages: int,
    overlap: bool,
    chunk: int,
    has_files: bool,
    limit: int,
    aborts: set[int],
    poison: bool,
) -> None:
    """Two engines, one after the other, with random requests, pools that are too small, aborts and NaN. `Rig.turn`
    audits all tiers."""
    folder = tmp_path_factory.mktemp("kv") if has_files else None
    pool_size = max(pool_pages * page_size, 80)
    for _ in range(2):
        rig = Rig(
            pool_size=pool_size,
            page_size=page_size,
            max_running=3,
            max_prefill_tokens=chunk,
            chunked_prefill_size=chunk,
            overlap=overlap,
            host_blocks=host_blocks,
            block_pages=block_pages,
            storage=folder,
            storage_bytes=limit,
        )
        rig.runner.poison = 96 if poison else None
        asked = {}
        for index, ((which, length), max_new_tokens, salt, num_turns) in enumerate(requests):
            ids = prompt(which, 60)[:length]
            rid = f"r{index}"
            asked[rid] = ids, max_new_tokens
            rig.add(rid, ids, salt, max_new_tokens=max_new_tokens)
            for _turn in range(num_turns):
                rig.turn()
            if index in aborts:
                rig.abort(rid)
        rig.run()
        for rid, (ids, max_new_tokens) in asked.items():
            heard = rig.heard[rid]
            expected = expected_output(ids, 1, max_new_tokens, VOCAB)
            assert heard.ids == expected[: len(heard.ids)]
            if isinstance(heard.finish, AbortFinish):
                assert int(rid[1:]) in aborts or 96 in [*ids, *expected]
            else:
                assert len(heard.ids) == max_new_tokens
            counts = heard.last.counts
            assert counts.host_tokens + counts.storage_tokens <= counts.cached_tokens <= max(len(ids) - 1, 0)
        settle(rig)
        assert rig.kv.tiers.blocks.num_pins == 0
