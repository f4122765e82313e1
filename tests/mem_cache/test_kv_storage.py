"""The thread of the KV files: jobs, their order, deadlines and the end."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from patience import PATIENCE_S

from tercet.mem_cache import kv_storage
from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_files import KVFiles
from tercet.mem_cache.kv_folder import BLOCK_STEP_NS, file_name
from tercet.mem_cache.kv_storage import KVStorage, ReadJob, WriteJob


def key(number: int) -> bytes:
    return bytes([number]) * 32


CONTENT = BlockContent(key(99), "", b"tokens")


def job(number: int, block: int | None = None) -> WriteJob:
    return WriteJob(key(number), number if block is None else block, CONTENT)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Storage(KVStorage):
    def __init__(self, folder: Path, num_blocks: int = 8) -> None:
        self.memory = np.random.default_rng(0).integers(0, 256, (num_blocks, 100), dtype=np.uint8)
        self.time = Clock()
        self.files = KVFiles(folder, 1 << 20)
        super().__init__(self.files, self.memory, self.time)

    def ended(self, count: int) -> list[ReadJob | WriteJob]:
        done: list[ReadJob | WriteJob] = []
        while len(done) < count:
            found = self.poll(PATIENCE_S)
            assert found
            done += found
        return done


def test_blocks_are_written_and_read_into_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_storage, "_LOOK_INTERVAL_S", 100 * PATIENCE_S)  # so only what is asked wakes the thread
    storage = Storage(tmp_path)
    for number in range(3):
        storage.write(job(number))
    assert len(storage.ended(3)) == 3 and all(storage.has(key(number)) for number in range(3))
    read = ReadJob([(key(0), 5), (key(1), 6), (key(7), 7)], deadline_s=1.0)
    storage.read(read)
    assert storage.ended(1) == [read] and read.num_read == 2 and read.missed == key(7), "up to the first one"
    assert np.array_equal(storage.memory[5:7], storage.memory[:2])
    late = ReadJob([(key(0), 4)], deadline_s=1.0)
    storage.time.now = 2.0
    storage.read(late)
    assert storage.ended(1) == [late] and late.num_read == 0 and late.missed == key(0)
    assert storage.poll() == [] and storage.poll(0.001) == []
    storage.close(PATIENCE_S)


def test_a_job_that_has_ended_is_there_without_waiting(tmp_path: Path) -> None:
    storage, one = Storage(tmp_path), job(0)
    assert storage.poll() == []
    storage.write(one)
    storage.close(PATIENCE_S)
    storage._thread.join(PATIENCE_S)
    assert storage.poll() == [one] and storage.poll() == []


@pytest.mark.parametrize("method", ["read", "write", "renew", "look", "take_changes"])
def test_the_thread_survives_an_unexpected_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """No job stays behind: a request waits for it."""
    monkeypatch.setattr(kv_storage, "_LOOK_INTERVAL_S", 0.01)
    storage = Storage(tmp_path)
    storage.write(job(0))
    storage.ended(1)
    began_s, logged = time.monotonic(), threading.Event()
    errors = []

    def fail(*args: object) -> None:
        raise RuntimeError("unexpected")

    def log(*args: object) -> None:
        errors.append(sys.exc_info()[1])
        logged.set()

    monkeypatch.setattr(kv_storage.logger, "exception", log)

    with monkeypatch.context() as broken:
        broken.setattr(storage.files, method, fail)
        broken.setattr(storage.files, "unrenewed", lambda keys: {key(0): 1})
        storage.use([key(0)])
        read = ReadJob([(key(0), 5)], deadline_s=1.0)
        storage.read(read)
        storage.write(job(1))
        assert {type(each) for each in storage.ended(2)} == {ReadJob, WriteJob}
        assert logged.wait(PATIENCE_S)
    assert read.num_read == (method != "read") and storage.has(key(1)) == (method != "write")
    again = ReadJob([(key(0), 6)], deadline_s=1.0)
    storage.read(again)
    assert storage.ended(1) == [again] and again.num_read == 1 and again.missed is None
    storage.close(PATIENCE_S)
    assert str(errors[0]) == "unexpected"
    assert len(errors) <= 4 + (time.monotonic() - began_s) / 0.01, "it waits before it looks again"


def test_reads_and_uses_go_before_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, order = Storage(tmp_path), []
    started, may_go = threading.Event(), threading.Event()
    write = storage.files.write

    def slow(*args: object) -> None:
        started.set()
        assert may_go.wait(PATIENCE_S)
        order.append("write")
        write(*args)

    monkeypatch.setattr(storage.files, "write", slow)
    monkeypatch.setattr(storage.files, "unrenewed", dict)
    monkeypatch.setattr(storage.files, "renew", lambda *args: order.append("use"))
    writes = [job(number) for number in range(3)]
    for one in writes:
        storage.write(one)
    assert started.wait(PATIENCE_S)
    storage.use([(key(0), 1)])  # `unrenewed` makes a dict of it
    reads = [ReadJob([(key(0), block)], deadline_s=1.0) for block in (5, 6)]
    for read in reads:
        storage.read(read)
    may_go.set()
    assert storage.ended(5) == [writes[0], *reads, *writes[1:]] and [read.num_read for read in reads] == [1, 1]
    assert order == ["write", "use", "write", "write"]
    storage.close(PATIENCE_S)


def test_close_writes_what_is_queued_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    for number in range(8):
        storage.write(job(number))
    storage.close(PATIENCE_S)
    assert all(storage.has(key(number)) for number in range(8))
    storage._thread.join(PATIENCE_S)
    assert not storage._thread.is_alive()

    stuck, started, may_go = Storage(tmp_path / "stuck"), threading.Event(), threading.Event()
    written = []

    def write(one: bytes, *args: object) -> None:
        written.append(one)
        started.set()
        assert may_go.wait(PATIENCE_S)

    monkeypatch.setattr(stuck.files, "write", write)
    for number in range(2):
        stuck.write(job(number))
    assert started.wait(PATIENCE_S)
    stuck.close(0.01)  # returns
    may_go.set()
    stuck._thread.join(PATIENCE_S)
    assert not stuck._thread.is_alive() and written == [key(0)]


def test_close_waits_for_the_last_write_and_reads_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    started, may_go = threading.Event(), threading.Event()
    write, wait_for = storage.files.write, storage._changed.wait_for

    def slow(*args: object) -> bool:
        started.set()
        assert may_go.wait(PATIENCE_S)
        with storage._changed:  # `close` has it until it waits
            return write(*args)

    def wait_for_the_thread(*args: object) -> object:
        may_go.set()
        return wait_for(*args)

    monkeypatch.setattr(storage.files, "write", slow)
    writes = [job(number) for number in range(2)]
    for one in writes:
        storage.write(one)
    assert started.wait(PATIENCE_S)
    storage.read(ReadJob([(key(0), 5)], deadline_s=1.0))
    monkeypatch.setattr(storage._changed, "wait_for", wait_for_the_thread)
    storage.close(PATIENCE_S)
    assert all(one.is_written for one in writes)
    storage._thread.join(PATIENCE_S)
    assert list(storage._done) == writes


def test_a_busy_server_sees_the_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_storage, "_LOOK_INTERVAL_S", 0.005)
    first, busy = Storage(tmp_path), Storage(tmp_path)
    write, numbers = busy.files.write, iter(range(1, 10**6))
    deadline_s = time.monotonic() + PATIENCE_S

    def write_and_queue(*args: object) -> bool:
        if not busy.has(key(0)) and time.monotonic() < deadline_s:
            busy.write(WriteJob(next(numbers).to_bytes(32, "big"), 1, CONTENT))  # it is never without a job
        return write(*args)

    monkeypatch.setattr(busy.files, "write", write_and_queue)
    busy.write(WriteJob(bytes([255]) * 32, 1, CONTENT))
    first.write(job(0))
    first.close(PATIENCE_S)
    busy.close(PATIENCE_S)
    assert busy.has(key(0)) and time.monotonic() < deadline_s


@pytest.mark.parametrize(("duration_s", "pause_s"), [(0.0, 5.0), (0.1, 5.0), (1.0, 50.0)])
def test_a_look_that_takes_long_comes_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duration_s: float, pause_s: float
) -> None:
    storage = Storage(tmp_path)
    storage.close(PATIENCE_S)
    storage._thread.join(PATIENCE_S)  # it reads the clock, too
    now_s = iter([100.0, 100.0 + duration_s])
    monkeypatch.setattr(kv_storage, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    KVStorage._look(storage)
    assert storage._look_s == pytest.approx(100.0 + duration_s + pause_s)


def test_a_use_renews_the_files_of_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    for number in range(3):
        storage.write(WriteJob(key(number), number, CONTENT, 10**18))
    storage.ended(3)
    storage.use([key(1), key(0), key(7)])
    storage.close(PATIENCE_S)
    last = [storage.files._folder.joinpath(file_name(key(number))).stat().st_mtime_ns for number in range(3)]
    assert last[2] == 10**18 and last[1] - last[0] == BLOCK_STEP_NS and last[0] > 10**18


def true_job(number: int) -> WriteJob:
    content = BlockContent(key(99), "", bytes([number]) * 8)
    return WriteJob(content.key, number, content)


def changes(storage: Storage, count: int) -> list[tuple[bytes, BlockContent | None]]:
    """The next `count` changes of files."""
    found: list[tuple[bytes, BlockContent | None]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline
        found += storage.take_file_changes(count - len(found))
        time.sleep(0.001)
    return found


def test_it_lists_the_files_and_then_what_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_storage, "_LOOK_INTERVAL_S", 0.005)
    before, later = Storage(tmp_path), Storage(tmp_path)
    jobs = [true_job(number) for number in range(5)]
    for one in jobs[:2]:
        before.write(one)
        before.ended(1)
    assert not before.has_file_changes, "nobody has asked"
    later.list_files()
    assert dict(changes(later, 2)) == {one.key: one.content for one in jobs[:2]}
    later.write(jobs[2])
    assert changes(later, 1) == [(jobs[2].key, jobs[2].content)]
    before.write(jobs[3])
    assert changes(later, 1) == [(jobs[3].key, jobs[3].content)], "a file of the other server"
    (path,) = tmp_path.glob(f"*{jobs[0].key.hex()}*")
    path.unlink()
    assert changes(later, 1) == [(jobs[0].key, None)]
    later.list_files()
    assert dict(changes(later, 3)) == {one.key: one.content for one in jobs[1:4]}
    later._file_changes += ((one.key, None) for one in jobs)
    for rest in (jobs[:2], jobs[2:4], jobs[4:], []):
        assert later.take_file_changes(2) == [(one.key, None) for one in rest], "no more in one turn"
    for storage in (before, later):
        storage.close(PATIENCE_S)
        assert not storage.has_file_changes


def test_a_file_that_does_not_say_what_its_key_stands_for_has_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_storage, "_LOOK_INTERVAL_S", 100 * PATIENCE_S)  # so only what is asked wakes the thread
    storage, jobs, asked = Storage(tmp_path), [true_job(number) for number in range(2)], threading.Event()
    storage.write(jobs[0])
    storage.ended(1)
    monkeypatch.setattr(storage.files, "content", lambda one: asked.set())
    storage.list_files()
    assert asked.wait(PATIENCE_S)
    storage.write(jobs[1])
    assert changes(storage, 1) == [(jobs[1].key, jobs[1].content)]
    storage.close(PATIENCE_S)


def test_a_write_that_finds_other_files_tells_what_each_of_them_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a write that needs room, the thread looks at the whole folder."""
    storage, jobs = Storage(tmp_path), [true_job(number) for number in range(3)]
    storage.write(jobs[0])
    storage.ended(1)
    storage.list_files()
    assert changes(storage, 1) == [(jobs[0].key, jobs[0].content)]
    KVFiles(tmp_path, 1 << 20).write(jobs[1].key, jobs[1].content, storage.memory[1])  # another server
    write = storage.files.write
    monkeypatch.setattr(storage.files, "write", lambda *args: storage.files.look() or write(*args))
    storage.write(jobs[2])
    assert dict(changes(storage, 2)) == {one.key: one.content for one in jobs[1:]}
    storage.close(PATIENCE_S)


def test_a_long_list_delays_neither_jobs_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    for number in range(8):
        storage.write(true_job(number))
    storage.ended(8)
    permits = threading.Semaphore(0)
    monkeypatch.setattr(storage.files, "content", lambda one: permits.acquire(timeout=PATIENCE_S) and None)
    storage.list_files()
    permits.release()
    read = ReadJob([(true_job(0).key, 5)], deadline_s=1.0)
    storage.read(read)
    permits.release()  # for the file that the thread may be at
    assert storage.ended(1) == [read] and read.num_read == 1
    permits.release(8)
    monkeypatch.setattr(storage.files, "content", lambda one: storage._undescribed.update({one: None}))  # for ever
    storage.list_files()
    storage.close(PATIENCE_S)
    storage._thread.join(PATIENCE_S)
    assert not storage._thread.is_alive()
