"""The journal of streams: any part of its file gives the start of each stream, and the file stays small."""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from tercet.srt import record_file
from tercet.srt.entrypoints import stream_journal
from tercet.srt.entrypoints.stream_journal import SavedOut, SavedPrompt, SavedRequest, StreamJournal
from tercet.srt.io_struct import Counts, LengthFinish, TextOut, TokenOut
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

STREAMS = [f"{number:032x}" for number in range(3)]


def request(number: int, owner: str = "") -> SavedRequest:
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=5, sampling_seed=number), stream=True)
    return SavedRequest("/generate", b"{}", owner, b"nonce", 1.5, {"dtype": "float32"}, [SavedPrompt(b"1234", options)])


def batch(number: int) -> list[SavedOut]:
    finish = LengthFinish(number) if number % 3 == 0 else None
    out = TextOut(tokens=TokenOut(rid="7", token_ids=[number], finish=finish, counts=Counts(1, number)), text="fünf")
    return [SavedOut(0, out, 1, 0.5, None if finish is None else 2.5, None if finish is None else (None, 0.5, 3.0))]


def steps(journal: StreamJournal, actions: list[tuple[int, bool]]) -> dict[str, int]:
    """Begins, extends and sometimes forgets streams. Returns the number of batches of each."""
    batches: dict[str, int] = {}
    for place, forgets in actions:
        name = STREAMS[place]
        if name not in batches:
            assert journal.begin(name, request(place))
            batches[name] = 0
        elif forgets:
            journal.forget(name)
            del batches[name]
        else:
            batches[name] += 1
            assert journal.note(name, batches[name], batch(batches[name]))
        journal.flush()
    return batches


def found(journal: StreamJournal) -> dict[str, int]:
    """The number of batches of each stream, each of which must be what was written."""
    batches = {}
    for name in journal.ids():
        saved = journal.load(name)
        assert saved.request == request(STREAMS.index(name))
        assert saved.batches == [batch(number) for number in range(1, len(saved.batches) + 1)]
        batches[name] = len(saved.batches)
    return batches


ACTIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5).map(lambda n: n == 0)), max_size=25)


@given(actions=ACTIONS, data=st.data())
@settings(deadline=None)
def test_any_cut_of_the_file_is_a_valid_start(actions: list[tuple[int, bool]], data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "streams")
        journal = StreamJournal.open(path)
        ends = [(path.stat().st_size, {})]
        for upto in range(1, len(actions) + 1):
            journal.close()
            path.unlink()
            journal = StreamJournal.open(path)
            ends.append((0, steps(journal, actions[:upto])))
            ends[-1] = (path.stat().st_size, ends[-1][1])
        journal.close()
        cut = data.draw(st.integers(0, path.stat().st_size))
        path.write_bytes(path.read_bytes()[:cut])
        again = StreamJournal.open(path)
        assert found(again) == next(kept for size, kept in reversed(ends) if size <= max(cut, ends[0][0]))
        again.close()


def test_a_damaged_batch_ends_its_stream_there_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "streams"
    journal = StreamJournal.open(path)
    steps(journal, [(0, False), (1, False), (0, False), (1, False)])
    middle = path.stat().st_size + 60
    steps_before = found(journal)
    journal.note(STREAMS[0], 2, batch(2))
    journal.note(STREAMS[1], 2, batch(2))
    journal.note(STREAMS[0], 3, batch(3))
    journal.close()
    data = bytearray(path.read_bytes())
    data[middle] ^= 1
    path.write_bytes(bytes(data))
    again = StreamJournal.open(path)
    assert steps_before == {STREAMS[0]: 1, STREAMS[1]: 1}
    assert found(again) == {STREAMS[0]: 1, STREAMS[1]: 2}, "a later batch does not follow a gap"
    assert "1 places were damaged" in caplog.text
    again.close()


def test_ended_streams_leave_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_journal, "_MIN_REWRITE_BYTES", 4000)
    path = tmp_path / "streams"

    async def run() -> None:
        journal = StreamJournal.open(path)
        kept = steps(journal, [(0, False), (0, False)])
        largest = 0
        for number in range(300):
            name = f"{number + 10:032x}"
            journal.begin(name, request(0))
            journal.flush()
            if number % 7 == 0:
                await asyncio.sleep(0)  # a new file may be being written
            journal.forget(name)
            journal.note(STREAMS[0], 2 + number, batch(2 + number))
            kept[STREAMS[0]] += 1
            journal.flush()
            while journal._rewrite is not None and number % 11 == 0:
                await asyncio.sleep(0.001)
            largest = max(largest, path.stat().st_size - 2 * journal.num_bytes)
        while journal._rewrite is not None:
            await asyncio.sleep(0.001)
        assert found(journal) == kept and largest < 20_000
        journal.close()
        again = StreamJournal.open(path)
        assert found(again) == kept
        again.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stream_journal, "_RETRY_S", 0.0)
    write = record_file._write
    is_full = False

    def maybe_write(file: int, at: int, data: bytes) -> None:
        if is_full:
            write(file, at, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, at, data)

    monkeypatch.setattr(record_file, "_write", maybe_write)
    path = tmp_path / "streams"

    async def run() -> None:
        nonlocal is_full
        journal = StreamJournal.open(path)
        steps(journal, [(0, False), (0, False)])
        before = path.read_bytes()
        is_full = True
        for number in range(2, 8):
            journal.note(STREAMS[0], number, batch(number))
            journal.flush()
            while journal._rewrite is not None and number % 2:  # the others begin while a new file is being written
                await asyncio.sleep(0.001)
        assert path.read_bytes() == before, "it is still a valid start"
        is_full = False
        journal.note(STREAMS[0], 8, batch(8))
        journal.flush()
        journal.note(STREAMS[0], 9, batch(9))
        while journal._rewrite is not None:
            await asyncio.sleep(0.001)
        journal.note(STREAMS[0], 10, batch(10))
        journal.flush()
        written = record_file.whole_records(path.read_bytes(), journal._file.mark, record_file.RECORDS_START)
        framed = [one if isinstance(one, int) else bytes(one.framed) for one in written]
        assert framed == journal._records[STREAMS[0]], "each record is there at once, and once"
        journal.close()
        again = StreamJournal.open(path)
        assert found(again) == {STREAMS[0]: 10}
        again.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    assert caplog.text.count("may end with this server: No space left") == 1 and "is written again" in caplog.text


def test_records_that_waited_for_a_full_disk_are_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = StreamJournal.open(tmp_path / "streams")
    steps(journal, [(0, False), (0, False)])

    def fail(file: int, at: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(record_file, "_write", fail)
        journal.note(STREAMS[0], 2, batch(2))
        journal.flush()
    journal.note(STREAMS[0], 3, batch(3))
    journal.close()
    again = StreamJournal.open(tmp_path / "streams")
    assert found(again) == {STREAMS[0]: 3}
    again.close()


def test_its_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stream_journal, "MAX_BYTES", 1000)
    journal = StreamJournal.open(tmp_path / "streams")
    assert journal.begin(STREAMS[0], request(0)) and journal.begin(STREAMS[1], request(1))
    number = 1
    while journal.note(STREAMS[0], number, batch(number)):
        number += 1
    assert not journal.note(STREAMS[0], number + 1, batch(number + 1)) and "no room" in caplog.text
    assert journal.ids() == [STREAMS[1]] and journal.num_bytes <= 1000
    assert journal.note(STREAMS[1], 1, batch(1))
    journal.close()
    again = StreamJournal.open(tmp_path / "streams")
    assert found(again) == {STREAMS[1]: 1}
    again.close()


def test_one_key_cannot_take_all_of_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_journal, "MAX_BYTES", 4000)
    names = [f"{number:032x}" for number in range(60)]
    journal = StreamJournal.open(tmp_path / "streams", is_shared=True)
    kept = [name for name in names if journal.begin(name, request(0, "greedy"))]
    assert kept and 1000 < journal.num_bytes <= 2000
    assert caplog.text.count("no room") == 1, "one warning a minute"
    journal.flush()
    journal.close()
    again = StreamJournal.open(tmp_path / "streams", is_shared=True)
    assert again.ids() == kept and not again.begin("e" * 32, request(0, "greedy"))
    assert again.begin("f" * 32, request(0, "modest"))
    for name in kept:
        again.forget(name)
    assert again.begin("e" * 32, request(0, "greedy"))
    assert set(again._owners) == set(again.ids()), "what is forgotten takes no memory"
    again.close()
