"""The folder of the KV files: names, times of use, and free space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_file_blocks import CONTENT, FILE_SIZE, block, key, read

from tercet.mem_cache import kv_folder
from tercet.mem_cache.kv_files import KVFiles
from tercet.mem_cache.kv_folder import (
    KVFile,
    file_name,
    in_order_of_use,
    list_folder,
    open_file,
    open_unfinished,
    spare_bytes,
    use_time_ns,
)


def test_a_list_has_the_files_of_blocks_only(tmp_path: Path) -> None:
    key = bytes(range(32))
    capitals, spaces = f"tercet-kv-{key.hex().upper()}.kv", f"tercet-kv-{key.hex(' ')}.kv"
    others = (
        "tercet-kv-.kv",
        "tercet-kv-notes",
        "tercet-kv-00.kv",
        "tercet-kv-x.kv",
        capitals,
        spaces,
        "x.tmp",
        "tercet-kv-a.tmp",
    )
    for name in (file_name(key), *others):
        (tmp_path / name).write_bytes(b"12345")
    os.utime(tmp_path / file_name(key), ns=(5, 7))
    for number in range(2):
        os.mkfifo(tmp_path / file_name(bytes([number]) * 32))
    (tmp_path / file_name(bytes([2]) * 32)).symlink_to(tmp_path / file_name(key))
    (tmp_path / "tercet-kv-b.tmp").mkdir()
    names = {path.name for path in tmp_path.iterdir()}
    file, path = open_unfinished(tmp_path)
    with file:
        file.write(b"1234567")
        found = list_folder(tmp_path)
        assert {one.name for one in tmp_path.iterdir()} == names - {"tercet-kv-a.tmp"} | {Path(path).name}
    assert found.files == [(7, 5, key)] and found.num_bytes == 12


def test_a_file_that_goes_while_the_folder_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, scandir = [tmp_path / file_name(bytes([number]) * 32) for number in range(2)], os.scandir
    for path in paths:
        path.write_bytes(b"1")

    @contextlib.contextmanager
    def scan_early(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            found = list(entries)
        paths[0].unlink()
        yield found

    with monkeypatch.context() as patch:
        patch.setattr(kv_folder.os, "scandir", scan_early)
        assert [file.key for file in list_folder(tmp_path).files] == [bytes([1]) * 32]


def test_no_file_stays_open(tmp_path: Path) -> None:
    """Not even one for each look at the folder."""

    def next_descriptors() -> list[int]:
        found = [os.dup(file.fileno()) for _ in range(8)]
        for descriptor in found:
            os.close(descriptor)
        return found

    file, _ = open_unfinished(tmp_path)
    with file:
        (tmp_path / "tercet-kv-a.tmp").write_bytes(b"1")
        os.mkfifo(tmp_path / "pipe")
        before = next_descriptors()
        list_folder(tmp_path)
        with contextlib.suppress(OSError):
            open_file(tmp_path / "pipe")
        assert next_descriptors() == before


def test_an_unfinished_file_goes_with_its_writer(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom tercet.mem_cache.kv_folder import open_unfinished\n"
        "file, path = open_unfinished(Path(sys.argv[1]))\nfile.write(b'123')\nprint(path, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        path = Path(writer.stdout.readline().strip())
        os.utime(path, (0, 0))
        assert list_folder(tmp_path).num_bytes == 3 and path.exists(), "however long it takes"
        writer.kill()
    assert list_folder(tmp_path).num_bytes == 0 and not path.exists()


@pytest.mark.parametrize("call", ["open", "flock"])
def test_what_nobody_can_lock_stays_for_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patch:
        if call == "flock":
            patch.setattr(kv_folder.fcntl, "flock", fail)
        file, path = open_unfinished(tmp_path)
        file.close()
        if call == "open":  # a file of another user
            patch.setattr(kv_folder.os, "open", fail)
        list_folder(tmp_path)
        assert os.path.exists(path)
        os.utime(path, (0, 0))
        list_folder(tmp_path)
        assert not os.path.exists(path)


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, others, close = fcntl.flock, [tmp_path], os.close
    locked: list[int] = []
    closed: list[int] = []

    def late(descriptor: int, operation: int) -> None:
        locked.append(descriptor)
        for folder in others[:1]:  # another server looks at the folder first
            others.clear()
            list_folder(folder)
        flock(descriptor, operation)

    monkeypatch.setattr(kv_folder.fcntl, "flock", late)
    monkeypatch.setattr(kv_folder.os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    file, path = open_unfinished(tmp_path)
    assert locked[0] in closed
    with file:
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    assert [one.name for one in tmp_path.iterdir()] == [Path(path).name]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to(__file__)
    with pytest.raises(OSError, match=r"Not a regular file|Too many levels of symbolic links"):
        open_file(path)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.binary(max_size=1))), st.booleans())
def test_few_files_are_sorted_at_once(files: list[tuple[int, int, bytes]], latest_first: bool) -> None:
    """Because no other thread runs meanwhile."""
    lens: list[int] = []

    def sorted_some(some: list[KVFile], *, reverse: bool) -> list[KVFile]:
        lens.append(len(some))
        return sorted(some, reverse=reverse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_folder, "_SORTED_AT_ONCE", 3)
        patch.setattr(kv_folder, "sorted", sorted_some, raising=False)
        found = list(in_order_of_use([KVFile(*file) for file in files], latest_first=latest_first))
    assert found == sorted(files, reverse=latest_first) and max(lens, default=0) <= 3


@settings(max_examples=30, deadline=None)
@given(
    uses=st.lists(st.tuples(st.integers(0, 400 * 10**9), st.integers(1, 20), st.booleans()), min_size=1, max_size=20)
)
def test_no_block_outlives_one_that_precedes_it(uses: list[tuple[int, int, bool]]) -> None:
    """Two prefixes that share their first three blocks. A use of one is a use of all of its blocks."""
    used_ns: dict[tuple[bool, int], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        for now_ns, length, which in sorted(uses):
            patch.setattr(kv_folder, "time", SimpleNamespace(time_ns=lambda now_ns=now_ns: 10**18 + now_ns))
            for index in range(length):
                used_ns[which and index >= 3, index] = use_time_ns(index)
    for (which, index), when_ns in used_ns.items():
        if index:
            assert used_ns[which and index - 1 >= 3, index - 1] > when_ns


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [(100 << 30, 5 << 30, 4 << 30), (1 << 30, 1 << 29, 0.45 * 2**30), (1 << 30, 0, -0.05 * 2**30), (0, 0, sys.maxsize)],
)
def test_a_share_of_the_disk_is_spared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, expected: float
) -> None:
    disk = SimpleNamespace(f_frsize=4096, f_blocks=total // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(kv_folder.os, "statvfs", lambda folder: disk)
    assert spare_bytes(tmp_path) == pytest.approx(expected, abs=4096)


def test_files_of_a_clock_that_was_wrong_go_first_and_are_right_after_a_use(tmp_path: Path) -> None:
    """Their time is a year ahead. They would stay for a year, and each new file would go in their place."""
    files = KVFiles(tmp_path, 10 * FILE_SIZE)
    for number in range(10):
        assert files.write(key(number), CONTENT, block(number))
        used_ns = use_time_ns(number) + 365 * 24 * 3600 * 10**9
        os.utime(tmp_path / file_name(key(number)), ns=(used_ns, used_ns))
    files = KVFiles(tmp_path, 10 * FILE_SIZE)
    for used, used_ns in files.unrenewed([key(3)]).items():
        files.renew(used, used_ns)
    for number in range(10, 16):
        assert files.write(key(number), CONTENT, block(number))
    assert all(read(files, number) for number in (3, *range(10, 16)))
    assert len(list_folder(tmp_path).files) <= 10


def test_a_use_by_a_server_whose_clock_is_an_hour_ahead_counts(tmp_path: Path) -> None:
    files = KVFiles(tmp_path, 10 * FILE_SIZE)
    assert files.write(key(1), CONTENT, block(1))
    used_ns = use_time_ns(0) + 3600 * 10**9
    os.utime(tmp_path / file_name(key(1)), ns=(used_ns, used_ns))
    assert [file.used_ns for file in list_folder(tmp_path).files] == [used_ns]
