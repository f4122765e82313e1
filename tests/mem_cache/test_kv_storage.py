"""The thread of the KV files: jobs, their order, deadlines and the end."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE_S

from tercet.mem_cache.kv_files import KVFiles
from tercet.mem_cache.kv_storage import KVStorage, ReadJob, WriteJob


def key(number: int) -> bytes:
    return bytes([number]) * 32


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


def test_blocks_are_written_and_read_into_other_blocks(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    for number in range(3):
        storage.write(WriteJob(key(number), number))
    assert len(storage.ended(3)) == 3 and all(storage.has(key(number)) for number in range(3))
    job = ReadJob([(key(0), 5), (key(1), 6), (key(7), 7)], deadline_s=1.0)
    storage.read(job)
    assert storage.ended(1) == [job] and job.num_read == 2, "up to the first one that is missing"
    assert np.array_equal(storage.memory[5:7], storage.memory[:2])
    late = ReadJob([(key(0), 4)], deadline_s=1.0)
    storage.time.now = 2.0
    storage.read(late)
    assert storage.ended(1) == [late] and late.num_read == 0
    assert storage.poll() == [] and storage.poll(0.001) == []
    storage.close(PATIENCE_S)


def test_reads_go_before_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    started, may_go = threading.Event(), threading.Event()
    write = storage.files.write

    def slow(*args: object) -> None:
        started.set()
        assert may_go.wait(PATIENCE_S)
        write(*args)

    monkeypatch.setattr(storage.files, "write", slow)
    writes = [WriteJob(key(number), number) for number in range(3)]
    for job in writes:
        storage.write(job)
    assert started.wait(PATIENCE_S)
    read = ReadJob([(key(0), 5)], deadline_s=1.0)
    storage.read(read)
    may_go.set()
    assert storage.ended(4) == [writes[0], read, *writes[1:]] and read.num_read == 1
    storage.close(PATIENCE_S)


def test_close_writes_what_is_queued_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    for number in range(8):
        storage.write(WriteJob(key(number), number))
    storage.close(PATIENCE_S)
    assert all(storage.has(key(number)) for number in range(8))
    storage._thread.join(PATIENCE_S)
    assert not storage._thread.is_alive()

    stuck, may_go = Storage(tmp_path / "stuck"), threading.Event()
    monkeypatch.setattr(stuck.files, "write", lambda *args: may_go.wait(PATIENCE_S))
    stuck.write(WriteJob(key(0), 0))
    stuck.close(0.01)  # returns
    may_go.set()
