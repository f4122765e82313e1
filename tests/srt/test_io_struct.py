from __future__ import annotations

import msgspec
import pytest

from tercet.managers.generation import error_of
from tercet.srt.errors import BY_TYPE
from tercet.srt.io_struct import AbortFinish, BatchTextOut, BatchTokenOut, Counts, TextOut, TokenOut, request_ids


@pytest.mark.parametrize("name", BY_TYPE)
def test_an_error_is_the_same_on_the_other_side(name: str) -> None:
    finish = AbortFinish.of(BY_TYPE[name]("what went wrong"))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(finish), type=AbortFinish)
    error = error_of(arrived)
    assert type(error) is BY_TYPE[name] and error.message == "what went wrong"
    assert arrived.status_code == BY_TYPE[name].status


def test_outputs_arrive_whole_and_their_requests_are_found_in_a_broken_frame() -> None:
    counts = Counts(prompt_tokens=5, completion_tokens=3, cached_tokens=2, num_retractions=1)
    tokens = BatchTokenOut([TokenOut(rid="a", token_ids=[1], finish=None, counts=counts)])
    texts = BatchTextOut([TextOut(tokens=tokens.outs[0], text="x")])
    for message in (tokens, texts):
        frame = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(frame, type=type(message)) == message
        assert request_ids(msgspec.msgpack.decode(frame)) == ["a"]
