"""KV files: verified when they are read, bounded in size, shared, and never a reason to fail."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from tercet.mem_cache import kv_files
from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_files import KVFiles

SIZE = 1000
CONTENT = BlockContent(b"before" * 5 + b"..", "salt", b"tokens.." * 2)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def block(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def read(files: KVFiles, number: int) -> bool:
    target = np.zeros(SIZE, np.uint8)
    found = files.read(key(number), target)
    assert not found or np.array_equal(target, block(number))
    return found


def age(folder: Path, number: int, seconds: float) -> None:
    (path,) = folder.glob(f"*{key(number).hex()}*")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_what_is_written_is_read_by_another_server(tmp_path: Path) -> None:
    files = KVFiles(tmp_path / "a" / "b", 1 << 20)
    other = KVFiles(tmp_path / "a" / "b", 1 << 20)
    files.write(key(1), CONTENT, block(1))
    assert files.has(key(1)) and read(files, 1)
    assert not other.has(key(1))
    other.look()
    assert other.has(key(1)) and read(other, 1)
    assert not other.has(key(2)) and not read(other, 2)


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, 5 * (SIZE + 200))
    for number in range(5):
        files.write(key(number), CONTENT, block(number))
        age(tmp_path, number, 100 - number)
    assert read(files, 0)  # now the most recent
    files.write(key(5), CONTENT, block(5))
    assert [number for number in range(6) if files.has(key(number))] == [0, 3, 4, 5]
    assert len(list(tmp_path.iterdir())) == 4
    assert not read(files, 1)
    smaller = KVFiles(tmp_path, 2 * (SIZE + 200))  # a lower bound at the next start
    assert len(list(tmp_path.iterdir())) == 1
    smaller.write(key(9), CONTENT, np.zeros(1 << 20, np.uint8))
    assert not smaller.has(key(9)) and smaller.is_writing, "larger than the bound"


def test_a_full_disk_switches_writing_off_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    files.write(key(1), CONTENT, block(1))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kv_files.os, "replace", full)
    with caplog.at_level(logging.WARNING):
        files.write(key(2), CONTENT, block(2))
        files.write(key(3), CONTENT, block(3))
    monkeypatch.undo()
    (line,) = caplog.records
    assert "No space left" in line.getMessage() and not files.is_writing
    files.write(key(4), CONTENT, block(4))
    assert len(list(tmp_path.iterdir())) == 1 and read(files, 1), "no half a file, and reading goes on"


def test_a_file_that_another_server_removes_is_missed_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    files.write(key(1), CONTENT, block(1))
    next(tmp_path.iterdir()).unlink()
    assert files.has(key(1)) and not read(files, 1) and not files.has(key(1))
    assert not caplog.records


def test_abandoned_files_are_removed_and_foreign_ones_stay(tmp_path: Path) -> None:
    for name in ("tercet-kv-x.tmp", "tercet-kv-y.tmp", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    os.utime(tmp_path / "tercet-kv-x.tmp", (0, 0))
    files = KVFiles(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "tercet-kv-y.tmp"]
    assert files.is_writing


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"--hicache-storage-dir .*kv: Not a directory"):
        KVFiles(tmp_path / "file" / "kv", 1 << 20)


def content(number: int, namespace: str = "") -> BlockContent:
    return BlockContent(key(99), namespace, bytes([number]) * 8)


@pytest.mark.parametrize("namespace", ["", "me", "ü", "\ud800"])
def test_a_file_says_what_its_key_stands_for(tmp_path: Path, namespace: str) -> None:
    files, one = KVFiles(tmp_path, 1 << 20), content(1, namespace)
    assert files.write(one.key, one, block(1))
    target = np.zeros(SIZE, np.uint8)
    assert files.read(one.key, target) and np.array_equal(target, block(1))
    assert files.content(one.key) == one
    assert files.content(key(1)) is None


def test_what_a_damaged_file_says_is_not_believed(tmp_path: Path) -> None:
    files, one = KVFiles(tmp_path, 1 << 20), content(1)
    files.write(one.key, one, block(1))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for place in (0, 8, 59, 60, 95, 97, 100):  # magic, version, length, key before, namespace, tokens
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        assert files.content(one.key) is None, place
    for length in (0, 40, 80, 100):
        path.write_bytes(whole[:length])
        assert files.content(one.key) is None, length
    path.write_bytes(whole)
    assert files.content(one.key) == one


def test_changes_are_told_in_order(tmp_path: Path) -> None:
    files, other = KVFiles(tmp_path, 3 * (SIZE + 200)), KVFiles(tmp_path, 1 << 20)
    (tmp_path / "tercet-kv-somebody.kv").write_bytes(b"")
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))
        age(tmp_path, number, 100 + number)
    assert files.take_changes() == ()
    files.list_files()
    assert files.take_changes() == [(key(2), True), (key(1), True)]
    other.write(key(3), CONTENT, block(3))
    files.look()
    files.write(key(4), CONTENT, block(4))  # too many: the least recently used ones go
    assert files.take_changes() == [(key(3), True), (key(2), False), (key(1), False), (key(4), True)]
    next(tmp_path.glob(f"*{key(3).hex()}*")).write_bytes(b"damaged")
    assert not read(files, 3) and files.take_changes() == [(key(3), False)]
    next(tmp_path.glob(f"*{key(4).hex()}*")).unlink()
    assert files.content(key(4)) is None and files.take_changes() == [(key(4), False)]
