"""A message that cannot be decoded or handled takes nothing with it but the requests that it names."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


def test_messages_can_have_the_names_of_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not UTF-8: \udcff"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run_dir = RunDir.create()
    run_dir.remove()
    assert msgspec.msgpack.encode([str(run_dir.path), run_dir.work_dir])


def test_each_life_has_its_own_sockets_and_removes_only_the_files_of_the_one_before(run_dir: RunDir) -> None:
    kept = run_dir.path / "grammar"
    for path in (kept, run_dir.journal, run_dir.stacks("scheduler")):
        path.touch()
    lives = [run_dir, run_dir.next_life()]
    assert list(run_dir.path.iterdir()) == [kept]
    for life in lives:
        assert len({life.scheduler, life.detokenizer, life.tokenizer}) == 3
    assert not {lives[0].scheduler, lives[0].detokenizer, lives[0].tokenizer, str(lives[0].journal)} & {
        lives[1].scheduler,
        lives[1].detokenizer,
        lives[1].tokenizer,
        str(lives[1].journal),
    }


def test_a_file_that_a_starting_process_creates_meanwhile_is_removed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir.create()
    late = run_dir.path / "0-scheduler"
    remove_folder = os.rmdir

    def create_and_remove_folder(*args: Any, **options: Any) -> None:
        monkeypatch.undo()
        late.touch()
        remove_folder(*args, **options)

    monkeypatch.setattr(os, "rmdir", create_and_remove_folder)
    run_dir.remove()
    assert os.rmdir is remove_folder and not run_dir.path.exists()


@pytest.mark.parametrize("make", [Sender, lambda *link: Receiver(*link, ToScheduler)])
def test_a_process_that_can_have_no_more_sockets_is_told_so(run_dir: RunDir, make: Any) -> None:
    """As of any other file that cannot be opened."""
    context: zmq.Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1)
    with context.socket(zmq.PUSH):
        with pytest.raises(OSError, match="Too many open files") as raised:
            make(context, run_dir.scheduler)
        assert raised.value.errno == errno.EMFILE
    context.destroy(linger=0)


def test_a_sender_waits_for_nobody_and_loses_nothing(run_dir: RunDir, context: zmq.Context) -> None:
    """The receiver may be busy for long, or may not have begun. ZeroMQ would keep 1000 messages."""
    sender: Sender = Sender(context, run_dir.scheduler)
    sent = [AbortReq(str(number)) for number in range(3000)]
    for message in sent:
        sender.send(message)
    receiver: Receiver = Receiver(context, run_dir.scheduler, ToScheduler)
    received: list = []
    while len(received) < len(sent):
        assert receiver.wait(PATIENCE_S)
        received += receiver.drain()
    assert received == sent


def test_a_receiver_handles_what_came_before_its_start_and_nothing_after_its_end(
    run_dir: RunDir, context: zmq.Context
) -> None:
    handled: list[Any] = []
    failures: list[Any] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, failure: failures.append(failure))
        receiver: AsyncReceiver = AsyncReceiver(context, run_dir.tokenizer, ToTokenizer, handled.append)
        sender: Sender = Sender(context, run_dir.tokenizer)
        sender.send(BatchTextOut([text("a")]))
        assert receiver._receiver.wait(PATIENCE_S)  # the descriptor has told of the message, and tells once
        receiver.start(loop)
        async with asyncio.timeout(PATIENCE_S):
            while not handled:
                await asyncio.sleep(0)
        receiver.close()
        other: AsyncReceiver = AsyncReceiver(context, run_dir.detokenizer, ToTokenizer, handled.append)
        other.start(loop)
        other.close()
        await asyncio.sleep(0)

    asyncio.run(work())
    assert len(handled) == 1 and failures == []


def test_a_wait_is_given_in_seconds(run_dir: RunDir, context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver: Receiver = Receiver(context, run_dir.scheduler, ToScheduler)
    waits_ms: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(receiver, "_socket", SimpleNamespace(poll=waits_ms.append))
        assert not receiver.wait(0.25)
    assert waits_ms == [250]
