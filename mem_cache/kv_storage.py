"""The thread that reads and writes KV files, so that the scheduler never waits for a disk.

A job names a block of the host's KV memory. The thread has that block from `read` or `write` until `poll` returns the
job. Reads go before writes. A read has a deadline: what is not read by then is not read. Between the jobs it looks
regularly for files of other servers, and updates the last-use times of the files.

For KV events, the thread also tells which files there are, and what their keys stand for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .block_keys import BlockContent
from .forgotten_keys import ForgottenKeys
from .kv_files import KVFiles

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 5.0
"""How often the thread looks for files of other servers."""
_MAX_LOOK_SHARE = 0.02
"""How much of its time that may take. In a very large folder the interval is longer."""


@dataclass(eq=False, slots=True)
class ReadJob:
    """Consecutive blocks of one prefix. `num_read`: the blocks that are valid, from the first on, when it has ended."""

    blocks: Sequence[tuple[bytes, int]]
    """Key and host block of each."""
    deadline_s: float
    prefix: Sequence[bytes] = ()
    """The keys of the blocks before them that are in host memory."""
    num_read: int = 0
    is_void: bool = False
    """Whether host memory was emptied since it began. What it has read is not kept."""

    @property
    def missed(self) -> bytes | None:
        """The first key that was not read, when it has ended. None: all were."""
        return self.blocks[self.num_read][0] if self.num_read < len(self.blocks) else None


@dataclass(eq=False, slots=True)
class WriteJob:
    """One block. `is_written`: whether there is a new file, when it has ended."""

    key: bytes
    block: int
    content: BlockContent
    used_ns: int | None = None
    """The time of its last use (kv_folder), in ns; None: when it is written."""
    prefix: Sequence[bytes] = ()
    """The keys of the whole prefix, if this is the last job of its request."""
    is_written: bool = False


class _Other(Enum):
    LOOK = auto()
    """Look for files of other servers."""
    LIST = auto()
    """List all files."""
    DESCRIBE = auto()
    """Read what the key of a file stands for."""


FileChange = tuple[bytes, BlockContent | None]
"""The key of a file that has come, and what it stands for. None: the file has gone."""


class _Renew(NamedTuple):
    """Set the time of the last use of a file."""

    key: bytes
    used_ns: int


_Job = ReadJob | WriteJob | _Renew | _Other


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
        self._renewals: dict[bytes, int] = {}
        """Times of uses that are not set yet, in ns."""
        self._done: deque[ReadJob | WriteJob] = deque()
        self._is_busy = False
        """Whether it reads, writes or renews a file."""
        self._is_closed = False
        self._look_s = time.monotonic() + _LOOK_INTERVAL_S
        """When the next look is due. Only the thread uses it."""
        self._must_list = False
        self._undescribed: dict[bytes, None] = {}
        """Keys of files that are not in `_file_changes` yet, in order. Only the thread uses it."""
        self._file_changes: deque[FileChange] = deque()
        self._thread = threading.Thread(target=self._run, name="kv storage", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return self.files.is_writing

    def has(self, key: bytes) -> bool:
        """Whether there is probably a file of this block."""
        return self.files.has(key)

    @property
    def forgotten(self) -> ForgottenKeys:
        """It has each key for which `has` returned True before and now returns False."""
        return self.files.forgotten

    @property
    def index(self) -> Container[bytes]:
        """The keys that `has` knows now."""
        return self.files.index

    def use(self, keys: Sequence[bytes]) -> None:
        """Count a use of the files of a prefix. `keys`: of its blocks, from the first on."""
        unrenewed = self.files.unrenewed(keys)
        if unrenewed:
            with self._changed:
                self._renewals.update(unrenewed)
                self._changed.notify_all()

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

    def list_files(self) -> None:
        """From now on, `take_file_changes` tells all: first the files that there are."""
        with self._changed:
            self._must_list = True
            self._changed.notify_all()

    @property
    def has_file_changes(self) -> bool:
        return bool(self._file_changes)

    def take_file_changes(self, limit: int) -> list[FileChange]:
        """The first `limit` changes that were not taken yet, in order."""
        changes = self._file_changes
        return [changes.popleft() for _ in range(min(limit, len(changes)))]

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most `timeout_s`, and end the thread after its present job."""
        with self._changed:
            self._reads.clear()
            self._changed.wait_for(lambda: not (self._writes or self._renewals or self._is_busy), timeout_s)
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                self._do(job)
            except Exception:
                # Requests wait for this job, and others will. They go on without the file.
                logger.exception("The thread of the KV files goes on after an unexpected error")
            if isinstance(job, ReadJob | WriteJob):
                with self._changed:
                    self._done.append(job)

    def _do(self, job: _Job) -> None:
        if isinstance(job, ReadJob):
            self._read(job)
        elif isinstance(job, WriteJob):
            job.is_written = self.files.write(job.key, job.content, self._memory[job.block], job.used_ns)
        elif isinstance(job, _Renew):
            self.files.renew(job.key, job.used_ns)
        else:
            self._do_other(job)
        self._note_file_changes(job)

    def _do_other(self, job: _Other) -> None:
        if job is _Other.LOOK:
            self._look()
        elif job is _Other.LIST:
            self._undescribed.clear()
            self.files.list_files()
        else:
            key = next(iter(self._undescribed))
            del self._undescribed[key]
            content = self.files.content(key)
            if content is not None:
                self._file_changes.append((key, content))

    def _look(self) -> None:
        began_s = time.monotonic()
        try:
            self.files.look()
        finally:
            ended_s = time.monotonic()
            self._look_s = ended_s + max(_LOOK_INTERVAL_S, (ended_s - began_s) / _MAX_LOOK_SHARE)

    def _note_file_changes(self, job: _Job) -> None:
        for key, is_there in self.files.take_changes():
            if not is_there:
                self._undescribed.pop(key, None)
                self._file_changes.append((key, None))
            elif isinstance(job, WriteJob) and job.key == key:
                self._file_changes.append((key, job.content))
            else:
                self._undescribed[key] = None

    def _next_job(self) -> _Job | None:
        """Waits for a job. Returns None at the end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(self._has_work, max(self._look_s - time.monotonic(), 0.0))
            if self._is_closed:
                return None
            job = self._take_job()
            self._is_busy = not isinstance(job, _Other)
            return job

    def _take_job(self) -> _Job:
        if self._reads:
            return self._reads.popleft()
        if time.monotonic() >= self._look_s:
            return _Other.LOOK
        if self._renewals:
            return _Renew(*self._renewals.popitem())
        if self._writes:
            return self._writes.popleft()
        if self._must_list:
            self._must_list = False
            return _Other.LIST
        return _Other.DESCRIBE if self._undescribed else _Other.LOOK

    def _has_work(self) -> bool:
        jobs = self._reads or self._renewals or self._writes
        return bool(jobs or self._must_list or self._undescribed or self._is_closed)

    def _read(self, job: ReadJob) -> None:
        for key, block in job.blocks:
            if self._clock() > job.deadline_s or not self.files.read(key, self._memory[block]):
                break
            job.num_read += 1
