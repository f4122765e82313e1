"""KV files: verified when they are read, bounded in size, shared, and never a reason to fail."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from kv_file_blocks import CONTENT, FILE_SIZE, SIZE, block, key, read

from tercet.mem_cache import kv_files
from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_files import KVFiles
from tercet.mem_cache.kv_folder import BLOCK_STEP_NS, open_unfinished


def age(folder: Path, number: int, seconds: float) -> None:
    (path,) = folder.glob(f"*{key(number).hex()}*")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def use(files: KVFiles, *numbers: int) -> None:
    """Counts a use of a prefix of these blocks."""
    files.look()
    for one, used_ns in files.unrenewed([key(number) for number in numbers]).items():
        files.renew(one, used_ns)


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
    use(files, 0)  # now the most recent
    files.write(key(5), CONTENT, block(5))
    assert [number for number in range(6) if files.has(key(number))] == [0, 3, 4, 5]
    assert len(list(tmp_path.iterdir())) == 4
    assert not read(files, 1)
    smaller = KVFiles(tmp_path, 2 * (SIZE + 200))  # a lower bound at the next start
    assert len(list(tmp_path.iterdir())) == 1
    smaller.write(key(9), CONTENT, np.zeros(1 << 20, np.uint8))
    assert not smaller.has(key(9)) and smaller.is_writing, "larger than the bound"


def test_a_full_folder_loses_nothing_at_a_restart(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, 5 * FILE_SIZE)
    for number in range(5):
        files.write(key(number), CONTENT, block(number))
    again = KVFiles(tmp_path, 5 * FILE_SIZE)
    assert all(read(again, number) for number in range(5)) and again.num_removed == 0


def test_a_prefix_goes_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_files, "use_time_ns", lambda index: 10**18 - index * BLOCK_STEP_NS)
    files = KVFiles(tmp_path, int(4.5 * FILE_SIZE))
    prefix = (3, 1, 2)
    for index, number in enumerate(prefix):
        files.write(key(number), CONTENT, block(number), 10**18 - index * BLOCK_STEP_NS)
    for number in (4, 5):
        files.write(key(number), CONTENT, block(number))
    assert [files.has(key(number)) for number in prefix] == [True, True, False]
    for number in (3, 1):
        age(tmp_path, number, 1000 * number)  # the first one most
    use(files, *prefix)
    files.write(key(6), CONTENT, block(6))
    assert [files.has(key(number)) for number in prefix] == [True, False, False]


def test_a_use_is_noted_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, keys = KVFiles(tmp_path, 1 << 20), [key(1), key(2), key(3)]
    start_ns = 10**18
    monkeypatch.setattr(kv_files, "use_time_ns", lambda index: start_ns - index * BLOCK_STEP_NS)
    for index in (0, 1):
        files.write(keys[index], CONTENT, block(index + 1), start_ns - index * BLOCK_STEP_NS)
    assert not files.unrenewed(keys)
    start_ns += 60 * 10**9
    assert files.unrenewed(keys) == {keys[0]: start_ns, keys[1]: start_ns - BLOCK_STEP_NS}
    next(tmp_path.glob(f"*{keys[1].hex()}*")).unlink()
    use(files, 1, 2, 3)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == [start_ns]
    assert not files.unrenewed(keys) and not files.has(keys[1])
    files.renew(keys[0], start_ns - 1)  # an earlier one that comes late
    assert next(tmp_path.iterdir()).stat().st_mtime_ns == start_ns


def test_a_failing_disk_stops_writing_for_a_while_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    files.write(key(1), CONTENT, block(1))

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(kv_files.os, "replace", fail)
        assert not files.write(key(2), CONTENT, block(2)) and not files.is_writing
        assert not files.write(key(3), CONTENT, block(3))
        patch.setattr(kv_files, "_RETRY_S", 0.0)
        files._retry_s = 0.0  # a minute has passed
        assert files.is_writing and not files.write(key(4), CONTENT, block(4))
        assert files.is_writing and not files.write(key(5), CONTENT, block(5))
    (line,) = caplog.records
    assert "Input/output error" in line.getMessage()
    assert len(list(tmp_path.iterdir())) == 1 and read(files, 1), "no half a file, and reading goes on"
    assert files.write(key(4), CONTENT, block(4)) and read(files, 4)


def test_some_space_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for six files. Somebody else fills it."""
    files, size = KVFiles(tmp_path, 1 << 30), FILE_SIZE
    foreign = 0

    def spare(folder: Path) -> int:
        return 6 * size - foreign - sum(path.stat().st_size for path in folder.iterdir())

    monkeypatch.setattr(kv_files, "spare_bytes", spare)
    for number in range(9):
        assert files.write(key(number), CONTENT, block(number))
        age(tmp_path, number, 100 - number)
        assert spare(tmp_path) >= 0 and (number >= 6 or not files.num_removed)
    assert files.has(key(8)) and not files.has(key(0)), "old files make room"
    foreign, num_files = 6 * size - 100, len(list(tmp_path.iterdir()))
    assert not files.write(key(9), CONTENT, block(9)) and not files.is_writing
    assert len(list(tmp_path.iterdir())) == num_files, "to remove all of them would not suffice"
    KVFiles(tmp_path, 1 << 30)
    assert len(list(tmp_path.iterdir())) == num_files


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_file_that_cannot_be_read_is_missed_but_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))

    def fail(*args: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(kv_files, "_read", fail)
        assert not read(files, 1) and not read(files, 2)
    (line,) = caplog.records
    assert os.strerror(error) in line.getMessage()
    assert files.num_damaged == 0 and not files.has(key(1))
    files.look()
    assert read(files, 1) and read(files, 2)


def test_a_file_that_cannot_be_removed_ends_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KVFiles(tmp_path, 2 * FILE_SIZE)
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))
        age(tmp_path, number, 100 - number)
    unlink = Path.unlink

    def sticky(path: Path, missing_ok: bool = False) -> None:
        if key(1).hex() in path.name:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", sticky)
    assert files.write(key(3), CONTENT, block(3))
    assert [files.has(key(number)) for number in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize(("folder_mode", "expected"), [(0o700, 0o600), (0o755, 0o600), (0o770, 0o660), (0o777, 0o666)])
def test_who_may_write_to_the_folder_may_use_the_files(tmp_path: Path, folder_mode: int, expected: int) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(folder_mode)
    KVFiles(folder, 1 << 20).write(key(1), CONTENT, block(1))
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == expected


def test_a_file_that_another_server_removes_is_missed_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    files.write(key(1), CONTENT, block(1))
    next(tmp_path.iterdir()).unlink()
    assert files.has(key(1)) and not read(files, 1) and not files.has(key(1))
    assert not caplog.records


def test_abandoned_files_are_removed_and_foreign_ones_stay(tmp_path: Path) -> None:
    for name in ("tercet-kv-x.tmp", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    file, path = open_unfinished(tmp_path)
    with file:
        file.write(b"x")
        files = KVFiles(tmp_path, 1)
        assert {one.name for one in tmp_path.iterdir()} == {"notes.txt", Path(path).name}
        assert files.is_writing and files.used_bytes == 1, "the other one will be finished"
    (tmp_path / "changed").touch()
    files.look()
    assert {one.name for one in tmp_path.iterdir()} == {"notes.txt", "changed"} and files.used_bytes == 0


@pytest.mark.timeout(20)
def test_a_named_pipe_is_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a writer, to open one takes for ever."""
    files = KVFiles(tmp_path, 1 << 20)
    files.write(key(1), CONTENT, block(1))
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert not read(files, 1) and files.content(key(1)) is None
    assert "Not a regular file" in caplog.text
    assert not KVFiles(tmp_path, 1 << 20).has(key(1))
    assert files.write(key(1), CONTENT, block(1)) and read(files, 1), "a file takes its place"


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"--hicache-storage-dir .*kv: Not a directory"):
        KVFiles(tmp_path / "file" / "kv", 1 << 20)


def test_a_folder_that_cannot_be_listed_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(kv_files, "list_folder", fail)
    with pytest.raises(ValueError, match=r"--hicache-storage-dir .*: Input/output error"):
        KVFiles(tmp_path, 1 << 20)


def test_it_tells_what_is_forgotten(tmp_path: Path) -> None:
    files, other = KVFiles(tmp_path, 1 << 20), KVFiles(tmp_path, 1 << 20)
    for number in (1, 2, 3):
        files.write(key(number), CONTENT, block(number))
    other.look()
    next(tmp_path.glob(f"*{key(1).hex()}*")).unlink()
    assert not read(other, 1)
    assert other.forgotten.after(0) == [key(1)]
    next(tmp_path.glob(f"*{key(2).hex()}*")).unlink()
    other.look()
    assert other.forgotten.after(1) == [key(2)]
    next(tmp_path.glob(f"*{key(3).hex()}*")).write_bytes(b"damaged")
    assert not read(other, 3)
    assert other.forgotten.after(2) == [key(3)] and other.forgotten.count == 3


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


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "a" / "kv"
    files = KVFiles(folder, 1 << 20)
    files.write(key(1), CONTENT, block(1))
    files.list_files()
    files.take_changes()
    shutil.rmtree(folder.parent)
    with caplog.at_level(logging.INFO):
        assert not files.write(key(2), CONTENT, block(2)) and not files.is_writing
        assert not folder.exists(), "the thread looks every few seconds"
        files.look()
        assert files.take_changes() == [(key(1), False)]
        assert not files.has(key(1)) and files.used_bytes == 0
        files.look()
        for number in (1, 2):
            assert files.write(key(number), CONTENT, block(number)) and read(files, number)
    assert folder.stat().st_mode & 0o777 == 0o700
    gone, again, goes_on = [record.getMessage() for record in caplog.records]
    assert "No such file" in gone and "is made again" in again and "again" in goes_on


def test_a_folder_that_cannot_be_made_again_costs_two_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = KVFiles(tmp_path / "kv" / "files", 1 << 20)
    files.write(key(1), CONTENT, block(1))
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_bytes(b"")  # a file is in its place
    for _ in range(3):
        files.look()
        assert not files.write(key(2), CONTENT, block(2)) and not read(files, 1)
        files._retry_s = 0.0  # a minute has passed
    assert [record.getMessage().split()[0] for record in caplog.records] == ["Writing", "Cannot"]
    assert all("Not a directory" in record.getMessage() for record in caplog.records)


def test_what_a_file_of_no_whole_tokens_says_is_not_believed(tmp_path: Path) -> None:
    files, one = KVFiles(tmp_path, 1 << 20), content(1)
    one = one._replace(tokens=one.tokens + b"x")
    assert files.write(one.key, one, block(1))
    assert files.content(one.key) is None


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


def test_a_list_tells_what_has_gone_since_the_last_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reported meanwhile is as of that look."""
    files = KVFiles(tmp_path, 1 << 20)
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))
    files.list_files()
    files.take_changes()
    next(tmp_path.glob(f"*{key(1).hex()}*")).unlink()
    KVFiles(tmp_path, 1 << 20).write(key(3), CONTENT, block(3), 10**18)  # another server
    files.list_files()
    assert files.take_changes() == [(key(1), False), (key(2), True), (key(3), True)]

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(kv_files, "list_folder", fail)
    files.list_files()
    assert files.take_changes() == [(key(2), True), (key(3), True)], "as of the last look"


@pytest.mark.parametrize(("age_s", "num_lists"), [(3600, 1), (-3600, 2)])
def test_a_folder_that_has_surely_not_changed_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, num_lists: int
) -> None:
    """Two changes in quick succession may have the same time. The time of a folder may be that of another machine."""
    files, lists = KVFiles(tmp_path, 1 << 20), []
    list_folder = kv_files.list_folder
    monkeypatch.setattr(kv_files, "list_folder", lambda folder: lists.append(folder) or list_folder(folder))
    changed_s = time.time() - age_s
    os.utime(tmp_path, (changed_s, changed_s))
    for _ in range(2):
        files.look()
    assert len(lists) == num_lists
    KVFiles(tmp_path, 1 << 20).write(key(1), CONTENT, block(1))
    files.look()
    assert files.has(key(1))


def test_new_files_of_a_prefix_are_told_from_its_start(tmp_path: Path) -> None:
    files, other = KVFiles(tmp_path, 1 << 20), KVFiles(tmp_path, 1 << 20)
    files.list_files()
    for index in (1, 0, 2):
        other.write(key(index), CONTENT, block(index), 10**18 - index * BLOCK_STEP_NS)
    files.look()
    assert files.take_changes() == [(key(index), True) for index in range(3)]


def test_changes_are_told_in_order(tmp_path: Path) -> None:
    files, other = KVFiles(tmp_path, 3 * (SIZE + 200)), KVFiles(tmp_path, 1 << 20)
    (tmp_path / "tercet-kv-somebody.kv").write_bytes(b"")
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))
        age(tmp_path, number, 100 + number)
    assert files.take_changes() == ()
    files.list_files()
    assert files.take_changes() == [(key(1), True), (key(2), True)]
    other.write(key(3), CONTENT, block(3))
    files.look()
    files.write(key(4), CONTENT, block(4))  # too many: the least recently used ones go
    assert files.take_changes() == [(key(3), True), (key(2), False), (key(1), False), (key(4), True)]
    next(tmp_path.glob(f"*{key(3).hex()}*")).write_bytes(b"damaged")
    assert not read(files, 3) and files.take_changes() == [(key(3), False)]
    next(tmp_path.glob(f"*{key(4).hex()}*")).unlink()
    assert files.content(key(4)) is None and files.take_changes() == [(key(4), False)]
