"""The store of responses against a plain model of it, and its memory."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tercet.srt.entrypoints.response_store import OVERHEAD_BYTES, ResponseStore, Turn

MAX_BYTES = 12 * OVERHEAD_BYTES
OWNERS = st.sampled_from(["", "key-1/", "key-2/"])
SIZES = st.sampled_from([0, 1, 100, OVERHEAD_BYTES, 3 * OVERHEAD_BYTES])


def items(*texts: str) -> bytes:
    return msgspec.json.encode(list(texts))


@dataclass
class Known:
    """What the model knows of a response. `chain`: the turns of its conversation."""

    owner: str
    head: bytes
    chain: list[Turn]


def size_of(known: list[Known]) -> int:
    """The memory of these responses: each turn that one of them needs counts once."""
    turns = {id(turn): turn for one in known for turn in one.chain}
    return sum(one.num_bytes for one in turns.values()) + sum(len(one.head) + OVERHEAD_BYTES for one in known)


class StoreMachine(RuleBasedStateMachine):
    """Requests begin with the turn of a stored response, and end when it may have been deleted or dropped since."""

    names = Bundle("names")
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(MAX_BYTES)
        self.known: dict[str, Known] = {}
        """The stored responses, oldest first."""
        self.num_named = 0

    @rule(target=running)
    def begin_conversation(self) -> list[Turn]:
        return []

    @rule(target=running, name=names, owner=OWNERS)
    def begin(self, name: str, owner: str) -> list[Turn]:
        found = self.store.find(name, owner)
        known = self.known.get(name)
        if known is None or known.owner != owner:
            assert found is None
            return []
        assert found is not None and found.turn is known.chain[-1] and found.head == known.head
        assert found.turn.conversation() == known.chain
        return known.chain

    def end(self, name: str, chain: list[Turn], owner: str, sizes: tuple[int, int, int]) -> None:
        head, given, output = sizes
        turn = Turn(chain[-1] if chain else None, b"i" * given, b"o" * output)
        one = Known(owner, b"h" * head, [*chain, turn])
        self.store.add(name, owner, one.head, turn)
        self.known.pop(name, None)
        if size_of([one]) > MAX_BYTES:
            return
        self.known[name] = one
        while size_of(list(self.known.values())) > MAX_BYTES:
            self.known.pop(next(iter(self.known)))

    @rule(target=names, chain=consumes(running), owner=OWNERS, sizes=st.tuples(SIZES, SIZES, SIZES))
    def end_new(self, chain: list[Turn], owner: str, sizes: tuple[int, int, int]) -> str:
        self.num_named += 1
        name = f"resp_{self.num_named}"
        self.end(name, chain, owner, sizes)
        return name

    @rule(name=names, chain=consumes(running), owner=OWNERS, sizes=st.tuples(SIZES, SIZES, SIZES))
    def end_again(self, name: str, chain: list[Turn], owner: str, sizes: tuple[int, int, int]) -> None:
        """A stream whose events are repeated ends twice."""
        self.end(name, chain, owner, sizes)

    @rule(name=names, owner=OWNERS)
    def delete(self, name: str, owner: str) -> None:
        had = name in self.known and self.known[name].owner == owner
        assert self.store.remove(name, owner) == had
        if had:
            del self.known[name]

    @invariant()
    def the_memory_is_counted(self) -> None:
        assert len(self.store) == len(self.known)
        assert self.store.num_bytes == size_of(list(self.known.values())) <= MAX_BYTES


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_conversation_is_stored_once() -> None:
    """n turns take n times the memory of one, not n**2 times."""
    store = ResponseStore(1 << 30)
    turn = None
    for i in range(100):
        turn = Turn(turn, items("x" * 1000), items("y" * 1000))
        store.add(f"resp_{i}", "", b"{}", turn)
    assert store.num_bytes < 100 * (2100 + 2 * OVERHEAD_BYTES)


def test_a_later_response_keeps_its_conversation() -> None:
    store = ResponseStore(1 << 20)
    first = Turn(None, items("a"), items("b"))
    store.add("resp_1", "", b"{}", first)
    store.add("resp_2", "", b"{}", Turn(first, items("c"), items("d")))
    before = store.num_bytes
    assert store.remove("resp_1", "") and not store.remove("resp_1", "")
    assert before - store.num_bytes == len(b"{}") + OVERHEAD_BYTES, "its turn stays"
    found = store.find("resp_2", "")
    assert found is not None
    assert [one.input_items for one in found.turn.conversation()] == [items("a"), items("c")]
    assert store.remove("resp_2", "") and store.num_bytes == 0


def test_the_oldest_responses_are_dropped_first() -> None:
    store = ResponseStore(10 * OVERHEAD_BYTES)
    for i in range(8):
        store.add(f"resp_{i}", "", b"", Turn(None, b"", b""))
    assert [i for i in range(8) if store.find(f"resp_{i}", "")] == [3, 4, 5, 6, 7]


def test_a_response_that_can_never_fit_costs_no_other() -> None:
    store = ResponseStore(4 * OVERHEAD_BYTES)
    store.add("resp_1", "", b"", Turn(None, b"", b""))
    store.add("resp_2", "", b"", Turn(None, b"x" * 4 * OVERHEAD_BYTES, b""))
    assert store.find("resp_1", "") and not store.find("resp_2", "")


def test_the_counted_memory_is_at_least_what_is_used() -> None:
    num = 2000
    gc.collect()
    tracemalloc.start()
    store = ResponseStore(1 << 30)
    turn: Turn | None = None
    for i in range(num):
        turn = Turn(turn if i % 7 else None, b'["%d"]' % i, b'["%d"]' % -i)
        store.add(f"resp_{i:032x}", f"{i:032x}/{'t' * 64}", b'{"id":%d}' % i, turn)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= store.num_bytes < num * 3 * OVERHEAD_BYTES


def test_the_end_of_a_very_long_conversation() -> None:
    """Nothing here recurs once for each turn."""
    store = ResponseStore(1 << 40)
    turn = None
    for _ in range(100_000):
        turn = Turn(turn, b"[]", b"[]")
    assert turn is not None
    store.add("resp_1", "", b"{}", turn)
    assert len(turn.conversation()) == 100_000
    assert store.remove("resp_1", "") and store.num_bytes == 0
    del turn
    gc.collect()


def test_a_response_is_returned_as_it_was_sent() -> None:
    store = ResponseStore(1 << 20)
    store.add("resp_1", "", b'{"id":"resp_1","output":[],"n":1.50}', Turn(None, b"[]", b'["a"]'))
    found = store.find("resp_1", "")
    assert found is not None and found.json() == b'{"id":"resp_1","output":["a"],"n":1.50}'
