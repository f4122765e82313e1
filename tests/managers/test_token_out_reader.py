"""TokenOutReader: the same outputs, whichever form they were sent in."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from scheduler_rig import Rig

from tercet.managers.token_out_reader import TokenOutReader
from tercet.srt.io_struct import BatchTokenOut, Counts, LengthFinish, NextTokens, ToDetokenizer, TokenOut, request_ids
from tercet.srt.logprobs import LogprobOptions, Logprobs, NewLogprobs

FOUND = Logprobs(own=b"\0\0\0\0")


def counts(num_tokens: int) -> Counts:
    return Counts(9, num_tokens, cached_tokens=4, num_retractions=2, host_tokens=3, storage_tokens=1)


def test_next_tokens_become_whole_outputs() -> None:
    reader = TokenOutReader()
    first = TokenOut(rid="a", token_ids=[5], finish=None, counts=counts(1))
    assert list(reader.read(BatchTokenOut([first]))) == [first]
    last = TokenOut(rid="a", token_ids=[7], finish=LengthFinish(3), counts=counts(3))
    message = BatchTokenOut([last], NextTokens(["a"], [6], [FOUND]))
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToDetokenizer)
    second = TokenOut(rid="a", token_ids=[6], finish=None, counts=counts(2), logprobs=NewLogprobs(None, FOUND))
    assert list(reader.read(message)) == [second, last]
    assert len(reader) == 0, "a request that has ended is forgotten"


def test_next_tokens_without_log_probabilities_become_outputs_without_them() -> None:
    reader = TokenOutReader()
    first = TokenOut(rid="a", token_ids=[5], finish=None, counts=counts(1))
    message = BatchTokenOut([], NextTokens(["a"], [6]))
    second = TokenOut(rid="a", token_ids=[6], finish=None, counts=counts(2))
    assert [*reader.read(BatchTokenOut([first])), *reader.read(message)] == [first, second]


def test_requests_that_ended_elsewhere_are_forgotten() -> None:
    reader = TokenOutReader()
    first = TokenOut(rid="a", token_ids=[5], finish=None, counts=counts(1))
    assert list(reader.read(BatchTokenOut([first])))
    reader.forget("a")
    reader.forget("never seen")
    assert len(reader) == 0


def test_tokens_of_a_forgotten_request_may_come_until_its_end() -> None:
    """The scheduler goes on with it until it hears of its end."""
    reader = TokenOutReader()
    reader.forget("a")
    (out,) = reader.read(BatchTokenOut([], NextTokens(["a"], [6])))
    assert (out.rid, out.token_ids) == ("a", [6])
    last = TokenOut(rid="a", token_ids=[7], finish=LengthFinish(3), counts=counts(3))
    assert list(reader.read(BatchTokenOut([last]))) == [last]
    assert len(reader) == 0


def test_a_message_that_cannot_be_decoded_names_the_requests_of_both_forms() -> None:
    out = TokenOut(rid="a", token_ids=[5], finish=None, counts=counts(1))
    message = msgspec.to_builtins(BatchTokenOut([out], NextTokens(["b", "c"], [1, 2])))
    assert sorted(request_ids(message)) == ["a", "b", "c"]


def _messages(rig: Rig) -> Iterator[BatchTokenOut]:
    """Runs the requests to their ends."""
    while rig.is_busy:
        rig.in_flight = rig.scheduler.turn(rig.in_flight)
        yield from rig.detokenizer.messages
        rig.detokenizer.messages.clear()


def test_only_outputs_that_say_nothing_else_are_sent_as_next_tokens() -> None:
    rig = Rig()
    rig.add("streamed", [*range(5)], max_new_tokens=6)
    rig.add("scored", [*range(10, 15)], max_new_tokens=6, logprobs=LogprobOptions(top_logprobs_num=1))
    rig.add("hidden", [*range(20, 25)], max_new_tokens=6, hidden=True)
    whole: list[str] = []
    bare: list[str] = []
    for message in _messages(rig):
        whole += [out.rid for out in message.outs]
        bare += message.next.rids
    assert sorted(whole) == ["hidden"] * 6 + ["scored"] * 2 + ["streamed"] * 2, "the first and the last outputs"
    assert sorted(bare) == ["scored"] * 4 + ["streamed"] * 4


def test_the_client_learns_of_a_retraction_with_the_next_token() -> None:
    rig = Rig(pool_size=64, max_running=4, conservativeness=0.0)
    for number in range(4):
        rig.add(f"r{number}", [*range(20 * number, 20 * number + 10)], max_new_tokens=20)
    reader, seen = TokenOutReader(), dict[str, list[int]]()
    for message in _messages(rig):
        for out in reader.read(message):
            known = rig.scheduler.queues.find(out.rid)
            assert known is None or out.counts.num_retractions == known.num_retractions
            seen.setdefault(out.rid, []).append(out.counts.num_retractions)
    assert rig.planner.num_retractions > 0
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert any(len(set(numbers[:-1])) > 1 for numbers in seen.values()), "learned before the last output"
