"""Files of records: whatever is cut off or changed, the other records are read as they were written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.srt import record_file
from tercet.srt.record_file import RECORDS_START, RecordFile, frame, whole_records

MARK = b"\x01\x02mark\x03\x04"
PAYLOADS = st.lists(st.binary(max_size=20) | st.just(frame(MARK[::-1], b"looks like one")) | st.just(MARK), max_size=6)


def payloads(data: bytes) -> list[bytes]:
    return [bytes(one.payload) for one in whole_records(data, MARK) if not isinstance(one, int)]


@given(PAYLOADS, st.data())
def test_any_cut_leaves_the_records_before_it(given: list[bytes], data: Any) -> None:
    written = b"".join(frame(MARK, payload) for payload in given)
    cut = data.draw(st.integers(0, len(written)))
    ends = [len(b"".join(frame(MARK, one) for one in given[: i + 1])) for i in range(len(given))]
    assert payloads(written[:cut]) == given[: sum(end <= cut for end in ends)]
    gaps = [one for one in whole_records(written[:cut], MARK) if isinstance(one, int)]
    assert len(gaps) == (cut not in (0, *ends))


@given(PAYLOADS.filter(bool), st.data())
def test_a_damaged_byte_costs_one_record(given: list[bytes], data: Any) -> None:
    frames = [frame(MARK, payload) for payload in given]
    place = data.draw(st.integers(0, len(given) - 1))
    byte = data.draw(st.integers(0, len(frames[place]) - 1))
    damaged = bytearray(frames[place])
    damaged[byte] ^= data.draw(st.integers(1, 255))
    found = payloads(b"".join([*frames[:place], bytes(damaged), *frames[place + 1 :]]))
    assert found == given[:place] + given[place + 1 :]


def test_a_file_is_private_and_belongs_to_one_process(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.touch(0o644)
    file, data = RecordFile.open(path)
    assert data == b"" and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="in use by another server"):
        RecordFile.open(path)
    other = tmp_path / "other"
    other.write_bytes(b"not ours")
    path.with_name("records.new").symlink_to(other)
    file.adopt(file.write_new([frame(file.mark, b"a")]), frame(file.mark, b"b"))
    assert other.read_bytes() == b"not ours" and not path.is_symlink()
    path.with_name("records.new").touch(0o666)
    file.adopt(file.write_new([frame(file.mark, b"a")]), frame(file.mark, b"b"))
    file.append(frame(file.mark, b"c"))
    assert path.stat().st_mode & 0o777 == 0o600
    file.close()
    again, data = RecordFile.open(path)
    assert [bytes(one.payload) for one in whole_records(data, again.mark, RECORDS_START)] == [b"a", b"b", b"c"]
    again.close()


@pytest.mark.parametrize("content", [b"the only copy of a novel", b"T", b"TERCETR1\x01"])
def test_other_files_are_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "records"
    path.write_bytes(content)
    if b"TERCETR1".startswith(content[:8]):  # the first write was cut off
        file, data = RecordFile.open(path)
        assert data == b""
        file.close()
        return
    with pytest.raises(ValueError, match="other content"):
        RecordFile.open(path)
    assert path.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="regular file"):
        RecordFile.open(tmp_path / "pipe")


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = RecordFile.open(tmp_path / "records")
    file.adopt(file.write_new([]), frame(file.mark, b"a"))
    before = (tmp_path / "records").read_bytes()

    def write_half(fd: int, at: int, data: bytes) -> None:
        os.pwrite(fd, data[: len(data) // 2], at)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(record_file, "_write", write_half)
    with pytest.raises(OSError, match="no space"):
        file.append(frame(file.mark, b"b" * 100))
    with pytest.raises(OSError, match="no space"):
        file.write_new([frame(file.mark, b"b")])
    assert (tmp_path / "records").read_bytes() == before and not (tmp_path / "records.new").exists()
    file.close()
