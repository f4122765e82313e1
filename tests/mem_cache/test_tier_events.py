"""KV events of host memory and files: a reader knows what they have, also after a restart."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_event_reader import DEVICE, DISK, HOST, KVEventReader
from patience import PATIENCE_S
from scheduler_rig import Rig
from tier_asks import settle_copies
from tier_reader import TierReader

from tercet.mem_cache import kv_storage, tier_events
from tercet.mem_cache.block_events import hash_pages
from tercet.mem_cache.block_keys import BlockContent, BlockKeys
from tercet.mem_cache.tier_events import TierEvents
from tercet.srt.kv_events import BlockStored, EventBatch, KVEvent

PAGE, BLOCK = 4, 8
VOCAB = 97


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def ask(rig: Rig, rid: str, ids: list[int], salt: str = "", max_new_tokens: int = 4) -> None:
    """Runs one request, and makes the copies of its KV."""
    rig.add(rid, ids, salt, max_new_tokens=max_new_tokens)
    rig.run()
    while rig.kv.has_copies or rig.in_flight is not None:
        rig.turn()


def keys_of(ids: list[int], salt: str = "", identity: bytes = b"fake") -> list[bytes]:
    return BlockKeys(identity, salt, BLOCK).cover(np.array(ids, np.int32))


def close(rig: Rig) -> None:
    rig.kv.tiers._storage.close(PATIENCE_S)


def test_a_prefix_that_leaves_the_pool_is_known_to_be_in_host_memory() -> None:
    rig = Rig(pool_size=64, page_size=PAGE, host_blocks=8)
    known = TierReader(rig.kv)
    first, other = prompt(1, 40), prompt(2, 56)
    ask(rig, "a", first, salt="me")
    known.read()
    whole = ("me", tuple(first))
    assert whole in known.reader.prefixes_in(DEVICE) & known.reader.prefixes_in(HOST)
    assert not known.reader.prefixes_in(DISK)
    ask(rig, "b", other)  # evicts the first from the pool, and some of it from host memory
    known.read()
    assert whole not in known.reader.prefixes_in(DEVICE)
    assert known.keys_in(HOST) == {*keys_of(first, "me")[:1], *keys_of(other)}
    known.check_host()
    rig.kv.flush()
    known.read()
    assert not any(known.reader.media.values())


def test_files_are_known_after_a_restart_and_have_the_same_hashes(tmp_path: Path) -> None:
    first, longer = prompt(1, 41), prompt(1, 41)[:20] + prompt(2, 30)
    rig = Rig(page_size=PAGE, host_blocks=64, storage=tmp_path)
    known = TierReader(rig.kv)
    ask(rig, "a", first, salt="me")
    ask(rig, "b", longer)
    files = {*keys_of(first[:40], "me"), *keys_of(longer[:48])}
    known.wait_for_files(files)
    assert known.keys_in(HOST) == files and known.reader.media[DISK] == known.reader.media[HOST]
    close(rig)
    fresh = Rig(page_size=PAGE, host_blocks=64, storage=tmp_path)
    router = TierReader(fresh.kv)
    router.wait_for_files(files)
    assert router.reader.media == {DEVICE: {}, HOST: {}, DISK: known.reader.media[DISK]}
    ask(fresh, "c", first, salt="me")
    router.read()
    assert router.keys_in(HOST) == {*keys_of(first[:40], "me")}
    assert ("me", tuple(first[:40])) in router.reader.prefixes_in(DEVICE)
    assert router.keys_in(DISK) == files
    router.check_host()
    close(fresh)


def test_files_are_told_anew_after_a_flush_but_not_those_of_other_weights(tmp_path: Path) -> None:
    rig = Rig(page_size=PAGE, host_blocks=64, storage=tmp_path)
    known = TierReader(rig.kv)
    ask(rig, "a", prompt(1, 41))
    files = set(keys_of(prompt(1, 40)))
    known.wait_for_files(files)
    rig.kv.flush()
    known.read()
    assert not known.reader.media[HOST] and not known.reader.media[DEVICE]
    known.wait_for_files(files)
    rig.kv.flush()
    rig.kv.tiers.change_identity(b"new weights")
    ask(rig, "b", prompt(3, 17))
    known.wait_for_files(set(keys_of(prompt(3, 16), identity=b"new weights")))
    rig.kv.flush()
    rig.kv.tiers.change_identity(b"fake")
    known.wait_for_files(files)
    close(rig)


def test_a_file_that_has_gone_by_a_flush_is_not_reported_after_it(tmp_path: Path) -> None:
    rig = Rig(page_size=PAGE, host_blocks=64, storage=tmp_path)
    known = TierReader(rig.kv)
    ask(rig, "a", prompt(1, 9))
    settle_copies(rig)
    deadline = time.monotonic() + PATIENCE_S
    while not rig.kv.tiers.has_file_changes:  # then it is the next that is reported
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (path,) = tmp_path.glob("*.kv")
    path.unlink()  # by another server
    rig.kv.flush()
    known.wait_for_files(set())
    close(rig)


def test_files_of_another_server_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_storage, "_LOOK_INTERVAL_S", 0.005)
    rig, other = (Rig(page_size=PAGE, host_blocks=8, storage=tmp_path) for _ in range(2))
    known = TierReader(rig.kv)
    ask(other, "a", prompt(1, 25))
    keys = keys_of(prompt(1, 24))
    known.wait_for_files(set(keys))
    (path,) = tmp_path.glob(f"*{keys[1].hex()}*")
    content = path.read_bytes()
    path.unlink()
    known.wait_for_files({keys[0], keys[2]})
    (tmp_path / "copy").write_bytes(content)
    (tmp_path / "copy").rename(path)  # whole, as a server writes it
    known.wait_for_files(set(keys))
    path.write_bytes(content[:-1] + b"?")
    with caplog.at_level(logging.WARNING):
        ask(rig, "b", prompt(1, 25))
    assert "is damaged" in caplog.text
    known.wait_for_files(set(keys))  # written anew
    known.check_host()
    close(rig)
    close(other)


def test_a_read_that_a_flush_overtakes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(page_size=PAGE, host_blocks=8, storage=tmp_path)
    ask(rig, "a", prompt(1, 25))
    close(rig)
    fresh = Rig(page_size=PAGE, host_blocks=8, storage=tmp_path)
    known = TierReader(fresh.kv)
    read, held = fresh.kv.tiers._storage.read, []
    monkeypatch.setattr(fresh.kv.tiers._storage, "read", held.append)
    fresh.add("b", prompt(1, 25), max_new_tokens=1)
    fresh.turn()
    fresh.kv.flush()
    monkeypatch.undo()
    read(*held)
    fresh.run()  # reads the files again
    assert fresh.heard["b"].last.counts.storage_tokens == 24
    known.wait_for_files(set(keys_of(prompt(1, 24))))
    known.check_host()
    close(fresh)


class Known:
    """TierEvents with a reader. There is no engine."""

    def __init__(self) -> None:
        self.reader = KVEventReader()
        self.found: list[KVEvent] = []
        self.events = TierEvents(PAGE, BLOCK, b"fake", self.found.append)

    def prefix_lens(self, medium: str) -> list[int]:
        """Of the blocks' last pages."""
        if self.found:
            self.reader.apply(msgspec.msgpack.encode(EventBatch(0.0, self.found)))
            self.found.clear()
        lens = [len(tokens) for _, tokens in self.reader.prefixes_in(medium)]
        return sorted(length for length in lens if length % BLOCK == 0)


IDS = np.array(prompt(7, 6 * BLOCK), np.int32)
KEYS = BlockKeys(b"fake", "me", BLOCK)
KEYS.cover(IDS)
CONTENTS = [KEYS.content(IDS, index) for index in range(6)]


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.integers(0, 5))
def test_files_are_reported_in_any_order_once_those_before_them_are(order: list, gone: set, saved: int) -> None:
    known = Known()
    for index in order:
        known.events.on_file(KEYS.keys[index], CONTENTS[index])
        known.events.on_file(KEYS.keys[index], CONTENTS[index])  # listed once more
        if index in gone:
            known.events.on_file(KEYS.keys[index], None)
    there = [index for index in range(6) if index not in gone]
    reported = {length // BLOCK - 1 for length in known.prefix_lens(DISK)}
    assert reported <= set(there)
    assert not {index for index in there if index - 1 in reported or index == 0} - reported
    for index in range(saved + 1):
        known.events.on_saved(KEYS.keys, index, IDS, "me")
    assert known.prefix_lens(HOST) == [(index + 1) * BLOCK for index in range(saved + 1)]
    reported = {length // BLOCK - 1 for length in known.prefix_lens(DISK)}
    assert not {index for index in there if index <= saved + 1 or index - 1 in reported} - reported
    for index in range(6):
        known.events.on_file(KEYS.keys[index], None)
        known.events.on_dropped(KEYS.keys[index])
    assert known.prefix_lens(DISK) == known.prefix_lens(HOST) == []
    assert not (known.events._blocks or known.events._orphans or known.events._parents)


def test_a_request_makes_a_file_known_of_which_nothing_before_it_is() -> None:
    known = Known()
    for index in (2, 3):
        known.events.on_file(KEYS.keys[index], CONTENTS[index])
    assert not known.found
    known.events.on_saved(KEYS.keys, 2, IDS, "me")
    assert [event.medium for event in known.found] == [HOST, DISK, DISK]
    assert known.found[0].block_hashes == known.found[1].block_hashes
    assert known.found[2].parent_block_hash == known.found[1].block_hashes[-1]


WAYS = st.sampled_from(["saved", "used", "read", "file", "none"])


@given(st.permutations(range(6)), st.lists(WAYS, min_size=6, max_size=6))
def test_a_page_has_the_same_hash_however_its_block_is_found(order: list[int], ways: list[str]) -> None:
    """A block has three pages. The blocks before it are known, in part, or not at all."""
    ids, keys = IDS[: 6 * 6], BlockKeys(b"fake", "me", 6)
    keys.cover(ids)
    hashes = hash_pages(ids.tobytes(), 2, "me", None)
    found: list[KVEvent] = []
    events = TierEvents(2, 6, b"fake", found.append)
    for index, way in zip(order, ways, strict=True):
        if way == "file":
            events.on_file(keys.keys[index], keys.content(ids, index))
        elif way == "read":
            events.on_read_begins(keys.keys, index, ids, "me")
            events.on_read(keys.keys[index], is_kept=True)
        elif way != "none":
            (events.on_saved if way == "saved" else events.on_used_file)(keys.keys, index, ids, "me")
    for event in found:
        assert isinstance(event, BlockStored) and len(event.block_hashes) == 3
        start = hashes.index(event.block_hashes[0])
        assert start % 3 == 0 and event.block_hashes == hashes[start : start + 3]
        assert event.parent_block_hash == (hashes[start - 1] if start else None)
        assert event.token_ids == ids[2 * start : 2 * start + 6].tolist()
    for index in reversed(range(6)):
        events.on_used_file(keys.keys, index, ids, "me")
        assert not events._parents.keys() & events._blocks.keys(), "no block that is known is an orphan"
    assert len(found) == 6 + sum(way in ("saved", "read") for way in ways)
    assert not events._orphans and not events._parents and not events._reading


def test_two_blocks_may_share_their_first_page() -> None:
    known = Known()
    ids = [IDS[:BLOCK], np.concatenate([IDS[:PAGE], IDS[:PAGE]])]
    keys = [BlockKeys(b"fake", "", BLOCK).cover(one) for one in ids]
    prefixes = [("", tuple(one.tolist())) for one in (*ids, IDS[:PAGE])]
    for index in (0, 1):
        known.events.on_saved(keys[index], 0, ids[index], "")
    known.prefix_lens(HOST)
    assert known.reader.prefixes_in(HOST) == set(prefixes)
    for index, left in ((0, prefixes[1:]), (1, [])):
        known.events.on_dropped(keys[index][0])
        known.prefix_lens(HOST)
        assert known.reader.prefixes_in(HOST) == set(left)


def test_files_that_wait_for_the_same_block_wait_apart() -> None:
    """Two prompts with the same first block: the file of one goes."""
    known = Known()
    ids = np.concatenate([IDS[:BLOCK], IDS[:BLOCK]])
    fork = BlockKeys(b"fake", "me", BLOCK)
    fork.cover(ids)
    known.events.on_file(KEYS.keys[1], CONTENTS[1])
    known.events.on_file(fork.keys[1], fork.content(ids, 1))
    known.events.on_file(KEYS.keys[1], None)
    known.events.on_file(KEYS.keys[0], CONTENTS[0])
    assert known.prefix_lens(DISK) == [BLOCK, 2 * BLOCK]
    assert ("me", tuple(ids.tolist())) in known.reader.prefixes_in(DISK)
    assert not known.events._orphans and not known.events._parents


def test_two_namespaces_may_have_the_same_salt_and_hashes() -> None:
    known = Known()
    namespaces = ("\ud800", "\ufffd" * 3)
    keys = [BlockKeys(b"fake", one, BLOCK).cover(IDS[:BLOCK]) for one in namespaces]
    for one, namespace in zip(keys, namespaces, strict=True):
        known.events.on_saved(one, 0, IDS, namespace)
    (stored,) = known.found
    known.events.on_dropped(keys[0][0])
    assert known.found == [stored], "the other one is still there"
    known.events.on_dropped(keys[1][0])
    assert known.prefix_lens(HOST) == []


def test_a_long_prompt_in_files_is_reported_at_once_when_its_start_is_found() -> None:
    known = Known()
    ids = np.arange(3000 * BLOCK, dtype=np.int32)
    keys = BlockKeys(b"fake", "", BLOCK)
    keys.cover(ids)
    for index in reversed(range(3000)):
        assert not known.found
        known.events.on_file(keys.keys[index], keys.content(ids, index))
    assert len(known.found) == 3000


def test_nothing_is_known_after_a_change_of_the_weights() -> None:
    known, other = Known(), BlockKeys(b"other", "me", BLOCK)
    other.cover(IDS)
    events = known.events
    events.on_saved(KEYS.keys, 0, IDS, "me")
    events.on_read_begins(KEYS.keys, 1, IDS, "me")
    events.on_file(KEYS.keys[3], CONTENTS[3])
    events.clear(b"other")
    known.found.clear()
    assert not (events._blocks or events._reading or events._orphans or events._parents)
    events.on_file(KEYS.keys[0], CONTENTS[0])
    events.on_saved(other.keys, 0, IDS, "me")  # the same tokens have the same hashes
    assert (known.prefix_lens(HOST), known.prefix_lens(DISK)) == ([BLOCK], [])


def test_files_of_other_models_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_events, "_MAX_ORPHANS", 3)
    known, other = Known(), BlockKeys(b"other", "me", BLOCK)
    other.cover(IDS)
    known.events.on_file(KEYS.keys[4], CONTENTS[4])
    for index in range(1, 6):
        known.events.on_file(other.keys[index], other.content(IDS, index))
        assert len(known.events._parents) == sum(map(len, known.events._orphans.values())) == min(index + 1, 3)
    known.events.on_file(KEYS.keys[3], CONTENTS[3])
    for index in range(3):
        known.events.on_file(KEYS.keys[index], CONTENTS[index])
    assert known.prefix_lens(DISK) == [(index + 1) * BLOCK for index in range(4)]
    known.events.on_used_file(KEYS.keys, 4, IDS, "me")
    assert known.prefix_lens(DISK) == [(index + 1) * BLOCK for index in range(5)]


@pytest.mark.parametrize("first", [0, 4], ids=["read from the start", "the device has the start"])
def test_each_page_of_a_long_read_is_hashed_once(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0
    hash_pages = tier_events.hash_pages

    def count(tokens: bytes, *args: Any) -> list[int]:
        nonlocal num_hashed
        hashes = hash_pages(tokens, *args)
        num_hashed += len(hashes)
        return hashes

    monkeypatch.setattr(tier_events, "hash_pages", count)
    known = Known()
    ids = np.arange(100 * BLOCK, dtype=np.int32)
    keys = BlockKeys(b"fake", "", BLOCK).cover(ids)
    for index in range(first, 100):
        known.events.on_read_begins(keys, index, ids, "")
    for key in keys[first:]:
        known.events.on_read(key, is_kept=True)
    assert num_hashed == len(ids) // PAGE
    hashes = [one for event in known.found for one in event.block_hashes]
    assert hashes == hash_pages(ids.tobytes(), PAGE, "", None)[first * BLOCK // PAGE :]


def test_a_file_of_another_model_is_never_reported() -> None:
    known = Known()
    other = BlockKeys(b"other", "me", BLOCK)
    other.cover(IDS)
    for index in range(6):
        known.events.on_file(other.keys[index], other.content(IDS, index))
    assert not known.found


@pytest.mark.parametrize("num_tokens", [0, PAGE, BLOCK + PAGE])
def test_a_file_of_another_length_is_not_reported(num_tokens: int) -> None:
    """Somebody else has written it. Without tokens it would have no hash to continue."""
    known = Known()
    content = CONTENTS[0]._replace(tokens=IDS[:num_tokens].tobytes())
    for one in (content, content._replace(before=content.key, tokens=IDS[:BLOCK].tobytes())):
        known.events.on_file(one.key, one)
    assert not known.found


def test_the_salt_is_the_namespace_as_valid_text() -> None:
    known = Known()
    content = BlockContent(BlockKeys(b"fake", "\ud800", BLOCK)._first, "\ud800", IDS[:BLOCK].tobytes())
    known.events.on_file(content.key, content)
    (event,) = known.found
    assert isinstance(event, BlockStored) and event.medium == DISK
    assert event.cache_salt == "\ufffd" * 3 and event.extra_keys == [["\ufffd" * 3], None]
    assert event.token_ids == IDS[:BLOCK].tolist() and event.parent_block_hash is None
