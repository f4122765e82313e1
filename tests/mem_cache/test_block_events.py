"""KV events of the radix cache: an independent reader of them knows exactly what the tree has."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_event_reader import KVEventReader, Prefix
from msgspec import UNSET
from radix_makers import i32, make, put
from scheduler_rig import Rig

from fakes import fingerprint_of
from tercet.mem_cache.block_events import BlockEvents
from tercet.mem_cache.radix_cache import RadixCache
from tercet.srt.adapters import AdapterFacts, namespace_of
from tercet.srt.io_struct import FlushCacheReq
from tercet.srt.kv_events import BlockStored, EventBatch
from tercet.srt.pause_messages import ContinueReq, PauseReq


def prefixes_in(cache: RadixCache) -> set[Prefix]:
    """The end of every page that a prompt can match, by a walk through the tree."""
    found: set[Prefix] = set()
    stack = [(child, key.decode(), ()) for key, child in cache._root.children.items()]
    while stack:
        node, salt, before = stack.pop()
        tokens = before + tuple(node.tokens.tolist())
        for end in range(len(before) + cache.page_size, len(tokens) + 1, cache.page_size):
            found.add((salt, tokens[:end]))
        stack += [(child, salt, tokens) for child in node.children.values()]
    return found


class Watched:
    """A reader of the events of a cache."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.events = cache.listener = BlockEvents(cache.page_size)
        self.reader = KVEventReader()

    def check(self) -> None:
        events = self.events.take()
        if events:
            self.reader.apply(msgspec.msgpack.encode(EventBatch(1.5, events)))
        assert self.reader.prefixes == prefixes_in(self.cache)
        assert self.events.take() == []


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "evict", "discard", "lock", "unlock", "reset"]),
        st.lists(st.integers(0, 2), min_size=1, max_size=5),
        st.sampled_from(["", "a", "ü"]),
    ),
    max_size=25,
)


@given(page_size=st.sampled_from([1, 4]), operations=OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_a_reader_knows_what_the_tree_has(page_size: int, operations: list) -> None:
    cache, allocator = make(page_size, 512)
    watched = Watched(cache)
    locked = []
    for what, blocks, salt in operations:
        tokens = [block for block in blocks for _ in range(3)]
        if what == "put":
            if allocator.num_free >= len(tokens) + page_size:
                put(cache, allocator, tokens, salt)
        elif what == "evict":
            cache.evict(len(tokens))
        elif what == "discard":
            cache.discard(i32(tokens), len(blocks) // 2 * page_size, salt)
        elif what == "lock":
            locked.append(cache.match(i32(tokens), salt).node)
            cache.lock(locked[-1])
        elif what == "unlock" and locked:
            cache.unlock(locked.pop())
        elif what == "reset" and not locked:
            cache.reset()
            allocator.clear()
        watched.check()


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(0, 3), st.integers(1, 12), st.sampled_from("ab")),
        min_size=1,
        max_size=10,
    ),
    page_size=st.sampled_from([1, 4]),
    overlap=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_reader_knows_the_cache_of_a_scheduler(prompts: list, page_size: int, overlap: bool) -> None:
    rig = Rig(pool_size=96, page_size=page_size, overlap=overlap, max_running=4, chunked_prefill_size=16)
    assert isinstance(rig.kv.cache, RadixCache)
    watched = Watched(rig.kv.cache)
    for turn in range(30):
        for index, (at, prompt_len, family, length, salt) in enumerate(prompts):
            if at == turn:
                prompt = [family] * (prompt_len // 2) + [index] * (prompt_len - prompt_len // 2)
                rig.add(f"r{index}", prompt, max_new_tokens=length, salt="" if salt == "a" else salt)
        if turn == 15:
            rig.inbox.messages += [PauseReq(1, True), FlushCacheReq(2)]
        if turn == 18:
            rig.inbox.messages.append(ContinueReq(3))
        rig.turn()
        watched.check()
    while rig.is_busy:
        rig.turn()
        watched.check()


def test_hashes_stand_for_the_whole_prefix_and_the_salt() -> None:
    def hashes(tokens: list[int], salt: str = "") -> list[int]:
        cache, allocator = make(2)
        watched = Watched(cache)
        put(cache, allocator, tokens, salt)
        (event,) = watched.events.take()
        assert isinstance(event, BlockStored)
        return event.block_hashes

    assert hashes([1, 2, 3, 4]) == hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 4])[0] == hashes([1, 2, 9, 9])[0]
    assert hashes([1, 2, 3, 4])[1] != hashes([2, 1, 3, 4])[1]
    assert not set(hashes([1, 2, 3, 4])) & set(hashes([1, 2, 3, 4], "a"))
    assert not set(hashes([1, 2, 3, 4], "b")) & set(hashes([1, 2, 3, 4], "a"))


def test_an_event_names_the_session_of_the_request_that_stored_the_blocks() -> None:
    rig = Rig(page_size=4, eviction="value", max_running=1)
    watched = Watched(rig.kv.cache)
    rig.kv.watch(watched.events)
    rig.add("first", list(range(16)), session_id="me", max_new_tokens=1)
    rig.add("second", [*range(16), 50, 51, 52, 53], max_new_tokens=1)
    rig.add("third", [*range(16), 60, 61, 62, 63], session_id="other", max_new_tokens=1)
    rig.run()
    watched.check()
    found = {watched.reader.media["GPU"][one][1][-4:]: name for one, name in watched.reader.sessions.items()}
    assert found.pop((60, 61, 62, 63)) == "other"
    assert len(found) == 4 and set(found.values()) == {"me"}, "the others use the blocks, but did not store them"


def test_the_bytes_of_an_event() -> None:
    cache, allocator = make(2)
    watched = Watched(cache)
    put(cache, allocator, [1, 2, 3, 4], "me")
    ((first, second),) = [event.block_hashes for event in watched.events._events]
    payload = msgspec.msgpack.encode(EventBatch(2.0, watched.events.take()))
    assert msgspec.msgpack.decode(payload) == [
        2.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": [first, second],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["me"], None],
                "cache_salt": "me",
            }
        ],
        0,
    ]


def test_an_event_names_no_salt_and_no_session_that_is_not_there() -> None:
    """Readers would take an empty salt for one."""
    cache, allocator = make(2)
    watched = Watched(cache)
    put(cache, allocator, [1, 2])
    put(cache, allocator, [1, 2, 3, 4], "me")
    put(cache, allocator, [1, 2, 3, 4, 5, 6], "me")
    payload = msgspec.msgpack.encode(EventBatch(2.0, watched.events.take()))
    plain, first, later = msgspec.msgpack.decode(payload)[1]
    assert not {"cache_salt", "extra_keys", "session_id"} & plain.keys()
    assert first["extra_keys"] == [["me"], None] and "extra_keys" not in later and later["cache_salt"] == "me"
    cache.reset()
    assert not watched.events._edges


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_edge_that_is_cut_twice_loses_its_blocks_one_by_one(page_size: int) -> None:
    cache, allocator = make(page_size)
    watched = Watched(cache)
    tokens = list(range(6 * page_size))
    put(cache, allocator, tokens)
    for kept in (2, 4):
        put(cache, allocator, [*tokens[: kept * page_size], *[99] * page_size])
    watched.check()
    while cache.evict(1):
        watched.check()
    assert watched.reader.prefixes == set() and watched.events._edges == {}


ADAPTER = AdapterFacts("pirate", "/p/1", fingerprint_of(1), 7)


def test_the_events_of_each_tier_name_the_adapter() -> None:
    """The fields that vLLM's readers know. Without its files, an adapter has no name."""
    rig = Rig(page_size=2, host_blocks=8, block_pages=1, max_loras=1)
    rig.adapters.begin({"pirate": "/p/1"}, is_restart=False)
    known = [ADAPTER]
    events = BlockEvents(2, lambda fingerprint: {one.fingerprint: one for one in known}.get(fingerprint))
    rig.kv.watch(events)
    events.take()

    def stored(rid: str, prompt: list[int], salt: str) -> list[BlockStored]:
        rig.add(rid, prompt, salt, adapter=ADAPTER.ref, max_new_tokens=1)
        rig.run()
        while rig.kv.has_copies:
            rig.turn()
        return [one for one in events.take() if isinstance(one, BlockStored)]

    plain = stored("a", [1, 2, 3, 4], "")
    assert {one.medium for one in plain} == {"GPU", "CPU_PINNED"}
    assert {(one.lora_name, one.lora_id, one.cache_salt) for one in plain} == {("pirate", 7, UNSET)}
    assert plain[0].extra_keys == [["pirate"], ["pirate"]]
    salted = stored("b", [1, 2, 3, 4], "me") + stored("c", [1, 2, 3, 4, 5, 6], "me")
    assert {(one.lora_name, one.lora_id, one.cache_salt) for one in salted} == {("pirate", 7, "me")}
    assert salted[0].extra_keys == [["pirate", "me"], ["pirate"]] and salted[-1].extra_keys == [["pirate"]]
    known.clear()
    nameless = stored("d", [7, 8], "me")
    assert {(one.lora_name, one.lora_id) for one in nameless} == {(None, None)}
    assert {one.cache_salt for one in nameless} == {namespace_of("me", ADAPTER.ref)}


def test_blocks_of_adapters_and_salts_have_hashes_of_their_own() -> None:
    cache, allocator = make(2)
    watched = Watched(cache)
    namespaces = [
        namespace_of(salt, adapter) for salt in ("", "x", "\0", ADAPTER.fingerprint) for adapter in (None, ADAPTER.ref)
    ]
    for namespace in namespaces:
        put(cache, allocator, [1, 2], namespace)
    found = [one for one in watched.events.take() if isinstance(one, BlockStored)]
    assert len({one.block_hashes[0] for one in found}) == len(namespaces)
    assert [one.cache_salt for one in found if one.lora_name is None and one.cache_salt == "\0"] == ["\0"]
