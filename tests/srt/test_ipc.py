"""A message that cannot be decoded or handled takes nothing with it but the requests that it names."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from patience import PATIENCE_S

from tercet.srt.io_struct import (
    AbortReq,
    BatchTextOut,
    BatchTokenOut,
    BrokenMessage,
    Counts,
    TextOut,
    ToDetokenizer,
    TokenOut,
    ToScheduler,
    ToTokenizer,
)
from tercet.srt.ipc import AsyncReceiver, Receiver, RunDir, Sender

BROKEN = [
    (b"", []),
    (b"\xc1\xc1", []),
    (msgspec.msgpack.encode("a string"), []),
    (msgspec.msgpack.encode({"type": "no such type", "rid": 3}), []),
    (msgspec.msgpack.encode({"type": "abort", "rid": 3}), []),
    (msgspec.msgpack.encode({"type": "generate", "rid": "r1", "input_ids": 3}), ["r1"]),
    (msgspec.msgpack.encode({"type": "generate", "rid": "r3", "sampling": {"top_p": 7.0}, "input_ids": b""}), ["r3"]),
    (msgspec.msgpack.encode({"type": "tokens", "outs": [["r4", [1]], [], "r5", [6], ["r7"]]}), ["r4", "r7"]),
    (msgspec.msgpack.encode({"type": "tokens", "outs": 5}), []),
]


@pytest.fixture
def run_dir() -> Iterator[RunDir]:
    run_dir = RunDir.create()
    yield run_dir
    run_dir.remove()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def text(rid: str) -> TextOut:
    return TextOut(tokens=TokenOut(rid=rid, token_ids=[1], finish=None, counts=Counts(1, 1)), text="x")


@pytest.mark.parametrize(("frame", "rids"), BROKEN)
def test_a_frame_that_cannot_be_decoded_names_its_requests_and_loses_no_other(
    frame: bytes, rids: list[str], run_dir: RunDir, context: zmq.Context
) -> None:
    union = ToDetokenizer if b"tokens" in frame else ToScheduler
    receiver: Receiver = Receiver(context, run_dir.scheduler, union)
    sender: Sender = Sender(context, run_dir.scheduler)
    good = (
        [BatchTokenOut([TokenOut(rid="a", token_ids=[], finish=None, counts=Counts(1, 1))])]
        if b"tokens" in frame
        else [AbortReq("a")]
    )
    sender.send(good[0])
    sender._socket.send(frame)
    sender.send(good[0])
    received: list = []
    while len(received) < 3:
        assert receiver.wait(PATIENCE_S)
        received += receiver.drain()
    assert received == [*good, BrokenMessage(rids, "a message of this request could not be decoded"), *good]


def test_a_message_whose_handling_raises_ends_its_requests_and_loses_no_other(
    run_dir: RunDir, context: zmq.Context
) -> None:
    handled = []

    def handle(message: ToTokenizer | BrokenMessage) -> None:
        if isinstance(message, BrokenMessage):
            handled.append(message.rids)
            raise ZeroDivisionError
        assert isinstance(message, BatchTextOut)
        if message.outs[0].rid == "bad":
            raise ZeroDivisionError
        handled.append([out.rid for out in message.outs])

    async def work() -> None:
        receiver: AsyncReceiver = AsyncReceiver(context, run_dir.tokenizer, ToTokenizer, handle)
        sender: Sender = Sender(context, run_dir.tokenizer)
        for rids in (["a"], ["bad", "b"], ["c"], ["d"]):
            sender.send(BatchTextOut([text(rid) for rid in rids]))
        receiver.start(asyncio.get_running_loop())
        async with asyncio.timeout(20):
            while ["d"] not in handled:
                await asyncio.sleep(0)
        receiver.close()

    asyncio.run(work())
    assert handled == [["a"], ["bad", "b"], ["c"], ["d"]]


@pytest.mark.parametrize("folder", ["a", "a" * 100])
def test_the_links_are_files_that_only_their_owner_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    first = RunDir.create()
    try:
        assert first.path.stat().st_mode & 0o777 == 0o700
        for run_dir in (first, first.next_life()):
            links = (
                run_dir.scheduler,
                run_dir.detokenizer,
                run_dir.tokenizer,
                run_dir.grammar,
                run_dir.grammar_replies,
            )
            assert all(link.startswith(f"ipc://{first.path}/") for link in links)
    finally:
        first.remove()
