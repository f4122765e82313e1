"""The files of --record-schedule: rotation, files that were cut, and files of another kind."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tercet.srt.schedule_record import (
    OLDEST_VERSION,
    VERSION,
    Flush,
    RecordFile,
    Recording,
    Start,
    pack_ids,
    unpack_ids,
)


def start(run: str = "a") -> Start:
    return Start(VERSION, run, 0, {}, 1, 64, 4, 16, 16, 128, 100, False)


def turns(path: Path) -> list[int]:
    return [record.turn for record in Recording(path).records()]


def write(path: Path, run: str, values: range, **limits: int) -> None:
    file = RecordFile(path, start(run), **limits)
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


def test_a_record_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write(path, "a", range(10))
    whole = path.read_bytes()
    for length in range(len(whole) - 30, len(whole)):
        path.write_bytes(whole[:length])
        assert turns(path) == list(range(len(turns(path)))) and len(turns(path)) < 10


def test_what_was_written_is_soon_readable(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record", start())
    for turn in range(3):
        file.write(Flush(turn, 0.5), now_s=10.0 + 2 * turn)
    assert turns(tmp_path / "record") == [0, 1, 2]
    file.close()


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    file = RecordFile(tmp_path / "record", start())
    assert file._file is not None
    with open("/dev/full", "wb") as full:  # each write to it fails with ENOSPC
        os.dup2(full.fileno(), file._file.fileno())
    file.write(Flush(1, 0.5), now_s=0.5)  # less than a second after the last flush: it stays in the buffer
    if call == "write":
        file.write(Flush(2, 0.5), now_s=2.0)
    else:
        getattr(file, call)()
    file.write(Flush(3, 0.5), now_s=4.0)
    file.flush()
    file.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "The recording of the schedule ends" in record.getMessage()
    assert "No space left on device" in record.getMessage()


def test_a_folder_is_refused_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "record"
    folder.mkdir()
    with pytest.raises(OSError, match="is not a regular file"):
        RecordFile(folder, start())
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
        RecordFile(path, msgspec.structs.replace(start(), version=version)).close()
        assert Recording(path).start.version == version
    RecordFile(path, msgspec.structs.replace(start(), version=VERSION + 1)).close()
    with pytest.raises(ValueError, match=r"of version 3, but versions 1 to 2 can be read"):
        Recording(path)


@pytest.mark.parametrize("vocab_size", [1 << 16, 1 << 17])
def test_token_ids_survive(vocab_size: int) -> None:
    ids = np.array([0, 1, vocab_size - 1], dtype=np.int32)
    assert unpack_ids(pack_ids(ids, vocab_size), vocab_size).tolist() == ids.tolist()
    assert len(pack_ids(ids, 1 << 16)) == 6
