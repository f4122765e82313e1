"""The files of --record-schedule: rotation, full disks, damaged files, and files of another kind."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import pytest

from tercet.srt import schedule_record
from tercet.srt.schedule_record import (
    OLDEST_VERSION,
    VERSION,
    Flush,
    Recording,
    ScheduleFile,
    Start,
    _read,
    narrow_ids,
    widened_ids,
)


def start(run: str = "a") -> Start:
    return Start(VERSION, run, 0, {}, 1, 64, 4, 16, 16, 128, 100, False)


def turns(path: Path) -> list[int]:
    return [record.turn for record in Recording(path).records()]


def write(path: Path, run: str, values: range, **limits: int) -> None:
    file = ScheduleFile(path, start(run), **limits)
    for turn in values:
        file.write(Flush(turn, 0.5), float(turn))
    file.close()


def test_old_files_are_renamed_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, "a", range(40), max_bytes=200, num_kept=100)
    assert turns(path) == list(range(40)) and Recording(path).is_whole
    num_files = len(list(tmp_path.iterdir()))
    assert num_files >= 5
    write(path, "b", range(40, 50), max_bytes=200, num_kept=100)
    assert turns(path) == list(range(40, 50)), "files of an earlier run are kept apart"
    write(path, "c", range(100), max_bytes=200, num_kept=3)
    found = turns(path)
    assert len(found) < 100 and found == list(range(100 - len(found), 100)) and not Recording(path).is_whole


def test_a_recording_belongs_to_one_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two servers would rename the files of each other."""
    path = tmp_path / "record"
    first = ScheduleFile(path, start("a"), max_bytes=300)
    with pytest.raises(OSError, match="is in use by another server"):
        ScheduleFile(path, start("b"))
    restarted = ScheduleFile(path, start("c"), may_begin_later=True)
    assert "is in use by another server" in caplog.text
    for turn in range(100):
        first.write(Flush(turn, 0.5), float(turn))
        restarted.write(Flush(turn, 0.5), float(turn))
    first.close()
    assert turns(path) == list(range(100)) and Recording(path).is_whole
    for turn in range(100, 300):
        restarted.write(Flush(turn, 0.5), float(turn))
    restarted.close()
    assert turns(path) == list(range(turns(path)[0], 300)), "it begins when the other one has ended"
    write(path, "d", range(3))


def test_a_record_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, "a", range(10))
    whole = path.read_bytes()
    for length in range(len(whole) - 30, len(whole)):
        path.write_bytes(whole[:length])
        assert turns(path) == list(range(len(turns(path)))) and len(turns(path)) < 10
        assert Recording(path).is_whole, "the process has died"


def damaged_part(tmp_path: Path) -> tuple[Path, Path, list[int]]:
    """The newest file of a recording, an older one, and the turns in that."""
    path = tmp_path / "record"
    write(path, "a", range(100), max_bytes=300, num_kept=100)
    parts = len(list(tmp_path.iterdir()))
    assert parts > 5
    older = tmp_path / "record.3"
    return path, older, [one.turn for one in _read(older) if isinstance(one, Flush)]


@pytest.mark.parametrize("length", [0, 5, 1000, 0xFFFFFFFF])
def test_a_damaged_length_costs_the_rest_of_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    path, older, lost = damaged_part(tmp_path)
    data = bytearray(older.read_bytes())
    (start_length,) = struct.unpack_from("<I", data)
    at = 4 + start_length + 2 * (len(data) - 4 - start_length) // len(lost)  # of the third of its records
    struct.pack_into("<I", data, at, length)
    older.write_bytes(data)
    recording = Recording(path)
    assert recording.is_whole, "nobody has read it yet"
    found = [record.turn for record in recording.records()]
    assert found == [turn for turn in range(100) if turn not in lost[2:]] and not recording.is_whole
    (record,) = caplog.records
    assert record.args == (older, at, len(data) - at, len(lost) - 2)


def test_a_file_without_a_start_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, older, lost = damaged_part(tmp_path)
    older.write_bytes(b"nonsense" + older.read_bytes())
    recording = Recording(path)
    assert not recording.is_whole
    assert [record.turn for record in recording.records()] == [turn for turn in range(100) if turn not in lost]
    assert "record.3 is not a recording" in caplog.text


def test_what_was_written_is_soon_readable(tmp_path: Path) -> None:
    file = ScheduleFile(tmp_path / "record", start())
    for turn in range(3):
        file.write(Flush(turn, 0.5), now_s=10.0 + 2 * turn)
    assert turns(tmp_path / "record") == [0, 1, 2]
    file.close()


def fill(file: ScheduleFile) -> None:
    """From now on, each write to the present file fails with ENOSPC."""
    assert file._file is not None
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file._file.fileno())


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_a_full_disk_stops_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    file = ScheduleFile(tmp_path / "record", start())
    fill(file)
    file.write(Flush(1, 0.5), now_s=0.5)  # less than a second after the last flush: it stays in the buffer
    if call == "write":
        file.write(Flush(2, 0.5), now_s=2.0)
    else:
        getattr(file, call)()
    file.write(Flush(3, 0.5), now_s=4.0)
    file.flush()
    file.close()
    file.write(Flush(4, 0.5), now_s=1000.0)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "The recording of the schedule stops" in record.getMessage()
    assert "No space left on device" in record.getMessage()


def test_the_recording_of_a_restarted_engine_may_begin_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone" / "record"
    with pytest.raises(OSError, match="No such file"):
        ScheduleFile(path, start())
    file = ScheduleFile(path, start(), may_begin_later=True)
    assert "The recording of the schedule stops" in caplog.text and "No such file" in caplog.text
    path.parent.mkdir()
    for now_s in range(200):
        file.write(Flush(now_s, 0.5), now_s=float(now_s))
    file.close()
    assert turns(path) == list(range(turns(path)[0], 200)) and not Recording(path).is_whole


def test_a_recording_goes_on_when_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries once a minute. As long as the disk is full, the older files stay as they are."""
    path, room = tmp_path / "record", [0]
    monkeypatch.setattr(schedule_record, "_free_bytes", lambda folder: room[0])
    file = ScheduleFile(path, start(), max_bytes=1000)
    for turn in range(3):
        file.write(Flush(turn, 0.5), now_s=2.0 * turn)
    fill(file)
    caplog.set_level(logging.INFO)
    for now_s in range(10, 400):
        file.write(Flush(now_s, 0.5), now_s=float(now_s))
        assert file.part == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["record", "record.lock"] and turns(path) == [0, 1, 2]
    room[0] = 1000
    with monkeypatch.context() as patch:
        patch.setattr(schedule_record.os, "fdopen", full_file)
        for now_s in range(400, 500):
            file.write(Flush(now_s, 0.5), now_s=float(now_s))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["record", "record.lock"] and turns(path) == [0, 1, 2]
    for now_s in range(500, 570):
        file.write(Flush(now_s, 0.5), now_s=float(now_s))
    file.close()
    found = turns(path)
    begun = found[3]
    assert found == [0, 1, 2, *range(begun, 570)] and 500 < begun <= 561
    assert not Recording(path).is_whole, "records are missing"
    assert [record.getMessage().split(" of the schedule ")[1][:7] for record in caplog.records] == [
        "stops, ",
        "goes on",
    ]


def full_file(descriptor: int, *_: object, **__: object) -> IO[bytes]:
    os.close(descriptor)
    return open("/dev/full", "wb")


def test_a_file_that_cannot_be_begun_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt would otherwise rename them, until none is left."""
    path = tmp_path / "record"
    file = ScheduleFile(path, start(), max_bytes=300, num_kept=3)
    monkeypatch.setattr(schedule_record.os, "fdopen", full_file)
    for turn in range(1000):
        file.write(Flush(turn, 0.5), now_s=float(turn))
    found = turns(path)
    assert found == list(range(len(found))) and found and Recording(path).is_whole


def test_a_folder_is_refused_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    with pytest.raises(OSError, match="is not a regular file"):
        ScheduleFile(folder, start())
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("data", [b"", b"abc", b"\x04\0\0\0abcd", b"\x01\0\0\0\xc0"])
def test_another_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "record"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is not a recording"):
        Recording(path)


def test_older_recordings_are_read_and_newer_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "record"
    for version in range(OLDEST_VERSION, VERSION + 1):
        ScheduleFile(path, msgspec.structs.replace(start(), version=version)).close()
        assert Recording(path).start.version == version
    ScheduleFile(path, msgspec.structs.replace(start(), version=VERSION + 1)).close()
    with pytest.raises(ValueError, match=r"of version 3, but versions 1 to 2 can be read"):
        Recording(path)


@pytest.mark.parametrize("vocab_size", [1 << 16, 1 << 17])
def test_token_ids_survive(vocab_size: int) -> None:
    ids = np.array([0, 1, vocab_size - 1], dtype=np.int32)
    assert widened_ids(narrow_ids(ids, vocab_size), vocab_size).tolist() == ids.tolist()
    assert len(narrow_ids(ids, 1 << 16)) == 6
