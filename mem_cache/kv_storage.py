"""The thread that reads and writes KV files, so that the scheduler never waits for a disk.

A job names a block of the host's KV memory. The thread has that block from `read` or `write` until `poll` returns the
job. Reads go before writes. A read has a deadline: what is not read by then is not read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .kv_files import KVFiles

_LOOK_INTERVAL_S = 5.0
"""How often an idle thread looks for files of other servers."""


@dataclass(eq=False, slots=True)
class ReadJob:
    """Consecutive blocks of one prefix. `num_read`: the blocks that are valid, from the first on, when it has ended."""

    blocks: Sequence[tuple[bytes, int]]
    """Key and host block of each."""
    deadline_s: float
    num_read: int = 0


@dataclass(eq=False, slots=True)
class WriteJob:
    """One block. `is_written`: whether there is a new file, when it has ended."""

    key: bytes
    block: int
    is_written: bool = False


class _Look:
    """Look for files of other servers."""


class KVStorage:
    """A thread with its files. All methods are for the scheduler's thread, and none waits for the disk but `close`."""

    def __init__(self, files: KVFiles, memory: npt.NDArray[np.uint8], clock: Callable[[], float]) -> None:
        """`memory`: uint8 [num_blocks, block_bytes], the host's KV memory. `clock`: that of the deadlines."""
        self.files = files
        """Their counts may be read by any thread."""
        self._memory = memory
        self._clock = clock
        self._changed = threading.Condition()
        # All of these are guarded by `_changed`.
        self._reads: deque[ReadJob] = deque()
        self._writes: deque[WriteJob] = deque()
        self._done: deque[ReadJob | WriteJob] = deque()
        self._is_busy = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv storage", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return self.files.is_writing

    def has(self, key: bytes) -> bool:
        """Whether there is probably a file of this block."""
        return self.files.has(key)

    def read(self, job: ReadJob) -> None:
        with self._changed:
            self._reads.append(job)
            self._changed.notify_all()

    def write(self, job: WriteJob) -> None:
        with self._changed:
            self._writes.append(job)
            self._changed.notify_all()

    def poll(self, timeout_s: float = 0.0) -> list[ReadJob | WriteJob]:
        """The jobs that have ended since the last call. Waits at most `timeout_s` for the first one."""
        if not self._done and not timeout_s:
            return []
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout_s)
            done = list(self._done)
            self._done.clear()
        return done

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread after its present job."""
        with self._changed:
            self._reads.clear()
            self._changed.wait_for(lambda: not self._writes and not self._is_busy, timeout_s)
            self._writes.clear()
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            if isinstance(job, ReadJob):
                self._read(job)
            elif isinstance(job, WriteJob):
                job.is_written = self.files.write(job.key, self._memory[job.block])
            else:
                self.files.look()
                continue
            with self._changed:
                self._done.append(job)

    def _next_job(self) -> ReadJob | WriteJob | _Look | None:
        """Waits for a job. Returns None at the end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._reads or self._writes or self._is_closed, _LOOK_INTERVAL_S)
            if self._is_closed:
                return None
            self._is_busy = True
            return self._reads.popleft() if self._reads else self._writes.popleft() if self._writes else _Look()

    def _read(self, job: ReadJob) -> None:
        for key, block in job.blocks:
            if self._clock() > job.deadline_s or not self.files.read(key, self._memory[block]):
                break
            job.num_read += 1
