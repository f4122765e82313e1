"""The folder of --weight-cache: one process writes an entry, and entries are removed only if that makes room."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from patience import PATIENCE_S

from tercet.model_executor.weights import cache_folder
from tercet.model_executor.weights.cache_folder import CacheFolder, Entry

DATA = b"weights" * 100
NAME = "tercet-x.packed"


class Server:
    """Opens or writes the entry NAME."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20, source_bytes: int = 1 << 60) -> None:
        self.num_written = 0
        self.has_looked = threading.Event()
        self.may_write = threading.Event()
        self.may_write.set()
        self._folder = CacheFolder(path, max_bytes)
        self._entry = Entry(path / NAME, "weights", len(DATA), source_bytes, self._open, self._write)

    def start(self) -> bytes | None:
        return self._folder.open_or_write(self._entry)

    def _open(self) -> bytes | None:
        try:
            found = self._entry.path.read_bytes()
        except FileNotFoundError:
            return None
        finally:
            self.has_looked.set()
        return found if found == DATA else None

    def _write(self, file: BinaryIO) -> None:
        assert self.may_write.wait(PATIENCE_S)
        self.num_written += 1
        file.write(DATA)


@contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written half of an entry, and goes on for ever."""
    script = (
        "import fcntl, sys\nfile = open(sys.argv[1], 'wb')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(b'x' * 1000)\nfile.flush()\nprint('ready', flush=True)\nsys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def entries(folder: Path, sizes: dict[str, int]) -> None:
    """Entries of these sizes, the first one used longest ago."""
    for age, (name, size) in enumerate(sizes.items()):
        (folder / f"tercet-{name}.packed").write_bytes(bytes(size))
        os.utime(folder / f"tercet-{name}.packed", (1000 + age, 1000 + age))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def disk_of(folder: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=size - sum(one.stat().st_size for one in folder.iterdir()))

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_of_servers_that_start_together_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "_POLL_S", 0.001)
    servers = [Server(tmp_path / "cache") for _ in range(4)]
    for server in servers:
        server.may_write.clear()
    with ThreadPoolExecutor(len(servers)) as pool:
        found = [pool.submit(server.start) for server in servers]
        assert all(server.has_looked.wait(PATIENCE_S) for server in servers)
        for server in servers:
            server.may_write.set()
        assert [one.result(PATIENCE_S) for one in found] == [DATA] * len(servers)
    assert sum(server.num_written for server in servers) == 1
    assert names(tmp_path / "cache") == [NAME]


def test_what_a_dead_process_left_is_written_anew(tmp_path: Path) -> None:
    with writer(tmp_path / f"{NAME}.tmp"), writer(tmp_path / "tercet-other.packed.tmp"):
        pass
    assert len(names(tmp_path)) == 2
    assert Server(tmp_path).start() == DATA
    assert names(tmp_path) == [NAME], "the file of the other entry has gone, too"


def test_a_process_that_dies_while_others_wait_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    with writer(tmp_path / f"{NAME}.tmp") as process:
        waits = threading.Event()
        wait = SimpleNamespace(**vars(cache_folder.time) | {"sleep": lambda seconds: waits.set()})
        monkeypatch.setattr(cache_folder, "time", wait)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(server.start)
            assert waits.wait(PATIENCE_S) and server.num_written == 0
            process.kill()
            assert found.result(PATIENCE_S) == DATA
    assert names(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("grows_until_s", "source_bytes", "end_s"), [(0, 99_300, 5), (20, 99_300, 25), (999, 99_300, 100), (0, 1300, 2)]
)
def test_nobody_waits_for_a_process_that_is_stuck_or_very_slow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    grows_until_s: float,
    source_bytes: int,
    end_s: float,
) -> None:
    """The clock moves by hand. To write the entry should take 100 or 2 s."""
    now_s, unfinished = [0.0], tmp_path / f"{NAME}.tmp"

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        if now_s[0] <= grows_until_s:
            os.truncate(unfinished, 1000 + int(100 * now_s[0]))

    monkeypatch.setattr(cache_folder, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    monkeypatch.setattr(cache_folder, "_BYTES_PER_S", 1000)
    server = Server(tmp_path, source_bytes=source_bytes)
    with writer(unfinished):
        assert server.start() is None and server.num_written == 0
    assert now_s[0] == pytest.approx(end_s, abs=3 * cache_folder._POLL_S)
    (line,) = caplog.records
    assert line.getMessage() == f"Waiting no longer for another process to write {unfinished}"


def test_a_file_that_is_finished_before_it_is_locked_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened, then the process that wrote it renames it and ends its lock."""
    server, flock = Server(tmp_path), fcntl.flock
    unfinished = tmp_path / f"{NAME}.tmp"
    unfinished.write_bytes(DATA)

    def late(descriptor: int, operation: int) -> None:
        if unfinished.exists() and not (tmp_path / NAME).exists():
            unfinished.rename(tmp_path / NAME)
        flock(descriptor, operation)

    monkeypatch.setattr(cache_folder.fcntl, "flock", late)
    assert server.start() == DATA and server.num_written == 0
    assert names(tmp_path) == [NAME]


def test_an_unfinished_file_counts(tmp_path: Path) -> None:
    entries(tmp_path, {"a": 1000, "b": 1000})
    with writer(tmp_path / "tercet-c.packed.tmp"):
        CacheFolder(tmp_path, max_bytes=3000).make_room(500)
        assert names(tmp_path) == ["tercet-b.packed", "tercet-c.packed.tmp"]
        with pytest.raises(OSError, match="are available"):
            CacheFolder(tmp_path, max_bytes=3000).make_room(2500)
        assert names(tmp_path) == ["tercet-b.packed", "tercet-c.packed.tmp"]
    CacheFolder(tmp_path, max_bytes=3000).make_room(2000)
    assert names(tmp_path) == ["tercet-b.packed"]


@pytest.mark.parametrize(
    ("max_bytes", "disk_bytes", "left"),
    [
        (5000, 10**6, ["a", "b", "c"]),
        (3000 + len(DATA) - 1, 10**6, ["b", "c"]),
        (1000 + len(DATA), 10**6, ["c"]),
        (len(DATA) - 1, 10**6, None),
        (10**6, 3000 + 2 * len(DATA), ["a", "b", "c"]),
        (10**6, 2999 + 2 * len(DATA), ["b", "c"]),
        (10**6, 2 * len(DATA), []),
        (10**6, 2 * len(DATA) - 1, None),
    ],
)
def test_entries_go_only_if_that_makes_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    max_bytes: int,
    disk_bytes: int,
    left: list[str] | None,
) -> None:
    """`left`: None: the entry cannot be written, and none goes."""
    entries(tmp_path, dict.fromkeys("abc", 1000))
    disk_of(tmp_path, disk_bytes, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert (Server(tmp_path, max_bytes).start() is None) == (left is None)
    expected = ["a", "b", "c"] if left is None else [*left, "x"]
    assert names(tmp_path) == [f"tercet-{name}.packed" for name in expected]
    assert [record.getMessage().partition(" in ")[0] for record in caplog.records] == (
        ["Could not cache the weights"] if left is None else []
    )


def test_space_that_others_still_use_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is as full after the removal as before."""
    entries(tmp_path, {"a": 10_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="are available"):
        CacheFolder(tmp_path).make_room(700)
