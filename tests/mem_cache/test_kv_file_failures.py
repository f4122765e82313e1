"""KV files that are damaged, gone, or of another user, and writes for which there is no room."""

from __future__ import annotations

import errno
import logging
import os
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
from kv_file_blocks import CONTENT, FILE_SIZE, block, key, read

from tercet.mem_cache import kv_files
from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_files import KVFiles
from tercet.mem_cache.kv_folder import Listing, file_name


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_folder_that_is_read_only_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def temporary_file(*, dir: Path | None = None) -> FileIO:
        if dir == tmp_path:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return FileIO(os.devnull)

    monkeypatch.setattr(kv_files.tempfile, "TemporaryFile", temporary_file)
    with pytest.raises(ValueError, match=r"--hicache-storage-dir .*: Read-only file system"):
        KVFiles(tmp_path, 1 << 20)


def test_a_damaged_file_is_removed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))
    damaged, other = (tmp_path / file_name(key(number)) for number in (1, 2))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert not read(files, 1) and not files.has(key(1)) and files.num_damaged == 1
    assert list(tmp_path.iterdir()) == [other]
    other.write_bytes(b"damaged")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)  # a file of another user
        assert not read(files, 2) and not files.has(key(2)) and files.num_damaged == 2
    assert files.write(key(2), CONTENT, block(2)) and read(files, 2), "a good file takes its place"


def test_a_file_is_written_once_and_counts_as_a_whole(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    assert files.used_bytes == 0
    for number in (1, 2):
        assert files.write(key(number), CONTENT, block(number))
        assert not files.write(key(number), CONTENT, block(3))
    assert read(files, 1) and read(files, 2)
    assert files.used_bytes == 2 * FILE_SIZE == sum(path.stat().st_size for path in tmp_path.iterdir())
    exact, smaller = KVFiles(tmp_path / "exact", FILE_SIZE), KVFiles(tmp_path / "smaller", FILE_SIZE - 1)
    assert exact.write(key(1), CONTENT, block(1)) and not smaller.write(key(1), CONTENT, block(1))


@pytest.mark.parametrize("call", ["fchmod", "utime", "close", "replace"])
def test_a_write_that_fails_at_any_step_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A network file system may tell only at the close that the disk is full."""
    files, close = KVFiles(tmp_path, 1 << 20), os.close

    def fail(*args: object, **_: object) -> None:
        if call == "close":
            close(*args)
        refuse()

    with monkeypatch.context() as patch:
        patch.setattr(kv_files.os, call, fail)
        assert not files.write(key(1), CONTENT, block(1))
    assert not files.is_writing and not files.has(key(1)) and files.used_bytes == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_kept_although_the_disk_has_space(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a quota of the user, or with too few inodes: only a write tells that no more files fit."""
    files, rename = KVFiles(tmp_path, 1 << 20), os.replace

    def rename_within_quota(source: Path, target: Path) -> None:
        if len(list(tmp_path.glob("*.kv"))) == 4:
            raise OSError(error, os.strerror(error))
        rename(source, target)

    monkeypatch.setattr(kv_files.os, "replace", rename_within_quota)
    for number in range(1, 10):
        assert files.write(key(number), CONTENT, block(number), 10**18 + number)
    # The fifth and each second one after it: one file makes room for it, and one for the next.
    assert files.is_writing and files.num_removed == 6 and files.used_bytes == 3 * FILE_SIZE
    assert [number for number in range(1, 10) if read(files, number)] == [7, 8, 9]


def test_a_full_disk_takes_at_most_one_file_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    for number in range(1, 5):
        files.write(key(number), CONTENT, block(number), 10**18 + number)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(kv_files.os, "replace", full)
        assert not files.write(key(5), CONTENT, block(5)) and not files.is_writing
    assert [number for number in range(1, 6) if read(files, number)] == [2, 3, 4]


def test_after_a_failure_the_disk_is_left_alone_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(kv_files.time, "monotonic", lambda: now_s)
    files = KVFiles(tmp_path, 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(kv_files.os, "replace", refuse)
        assert not files.write(key(1), CONTENT, block(1))
    now_s += 59.9
    assert not files.is_writing and not files.write(key(1), CONTENT, block(1)) and not list(tmp_path.iterdir())
    now_s += 0.1
    assert files.is_writing and files.write(key(1), CONTENT, block(1)) and read(files, 1)


def test_a_disk_that_fails_again_after_a_good_write_costs_another_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    for number in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(kv_files.os, "replace", refuse)
            assert not files.write(key(number), CONTENT, block(number))
        files._retry_s = 0.0  # a minute has passed
        assert files.write(key(number), CONTENT, block(number))
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 2 and all("Operation not permitted" in line for line in lines)


class Reader(FileIO):
    """Refuses to take the memory that a damaged length asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None and 0 <= size <= 1 << 20
        return super().read(size)


def test_a_file_with_any_byte_changed_or_cut_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says of its key may only have another namespace, which readers of KV events compare with the key."""
    monkeypatch.setattr(kv_files, "open_file", Reader)
    monkeypatch.setattr(kv_files.logger, "disabled", True)
    files, content = KVFiles(tmp_path, 1 << 20), BlockContent(key(99), "me", b"tokens..")
    data, target = np.arange(20, dtype=np.uint8), np.zeros(20, np.uint8)
    files.write(content.key, content, data)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert files.read(content.key, target) and np.array_equal(target, data)
    changed = [
        whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]
        for place in range(len(whole))
        for bits in (0x01, 0x80, 0xFF)
    ]
    for damaged in [*changed, *(whole[:length] for length in range(len(whole))), whole + b"x"]:
        path.write_bytes(damaged)
        said = files.content(content.key)
        assert said is None or said._replace(namespace="me") == content
        assert not files.read(content.key, target) and not path.exists()


def test_a_use_of_a_file_that_has_gone_tells_so(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, 1 << 20)
    files.write(key(1), CONTENT, block(1), 10**18)
    files.list_files()
    files.take_changes()
    next(tmp_path.iterdir()).unlink()
    files.renew(key(1), 10**18 + 1)
    assert not files.has(key(1)) and files.take_changes() == [(key(1), False)]


def test_a_use_of_a_file_of_another_user_counts_from_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write to a file may set its time to the present one only."""
    files, utime = KVFiles(tmp_path, 1 << 20), os.utime
    files.write(key(1), CONTENT, block(1), 10**18)

    def only_now(path: Path, ns: tuple[int, int] | None = None) -> None:
        utime(path) if ns is None else refuse()

    with monkeypatch.context() as patch:
        patch.setattr(kv_files.os, "utime", only_now)
        files.renew(key(1), 10**18 + 1)
        assert next(tmp_path.iterdir()).stat().st_mtime_ns > 10**18 + 1
        patch.setattr(kv_files.os, "utime", refuse)  # the folder has become read-only
        files.renew(key(1), 10**18 + 2)
    assert read(files, 1)


def test_a_bound_of_one_file_holds_the_last_one(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, FILE_SIZE)
    for number in (1, 2, 3):
        assert files.write(key(number), CONTENT, block(number)) and read(files, number)
        assert files.num_removed == number - 1 and files.used_bytes == FILE_SIZE
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_is_written_if_no_file_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = KVFiles(tmp_path, 2 * FILE_SIZE)
    for number in (1, 2):
        files.write(key(number), CONTENT, block(number))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert not files.write(key(3), CONTENT, block(3)) and not files.is_writing
    assert read(files, 1) and read(files, 2) and len(list(tmp_path.iterdir())) == 2
    assert files.num_removed == 0 and files.used_bytes == 2 * FILE_SIZE


def test_a_file_that_another_server_removes_first_makes_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten files fit. To write another one, two go."""
    files, list_folder = KVFiles(tmp_path, 10 * FILE_SIZE), kv_files.list_folder
    for number in range(10):
        files.write(key(number), CONTENT, block(number), 10**18 + number)

    def list_too_early(folder: Path) -> Listing:
        found = list_folder(folder)
        (tmp_path / file_name(key(0))).unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(kv_files, "list_folder", list_too_early)
        assert files.write(key(10), CONTENT, block(10))
    assert [number for number in range(11) if files.has(key(number))] == list(range(2, 11))
    assert files.used_bytes == 9 * FILE_SIZE == sum(path.stat().st_size for path in tmp_path.iterdir())
