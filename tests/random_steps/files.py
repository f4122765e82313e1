"""Files of KV blocks in memory, without a thread, so that a case runs the same way each time."""

from __future__ import annotations

from collections.abc import Container, Sequence
from random import Random

import numpy as np

from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.forgotten_keys import ForgottenKeys
from tercet.mem_cache.kv_storage import FileChange, ReadJob, WriteJob


class FakeStorage:
    """A KVStorage whose jobs take a random number of polls. Some reads find damaged files, the disk may be full,
    and another server may remove files."""

    def __init__(self, memory: np.ndarray, seed: str, before: FakeStorage | None = None) -> None:
        """`memory`: uint8 [num_blocks, block_bytes]. `before`: that of the last engine, whose files are still there."""
        self.is_writing = True
        self.files = self
        self.used_bytes = self.max_bytes = 0
        self.num_damaged = self.num_removed = self.num_read = 0
        self.forgotten = ForgottenKeys()
        self._memory = memory
        self._rng = Random(seed)
        self._done_share = self._rng.choice([0.5, 0.5, 0.02])
        """Probability that a poll returns a job. A slow disk lets requests wait until they compute KV themselves."""
        self._full_share = self._rng.choice([0.005, 0.1])
        """Probability that a write finds a full disk."""
        self._others = Random(f"other servers {seed}")
        self._gone_share = self._others.choice([0.0, 0.0, 0.1])
        """Probability that another server has removed a file before a poll."""
        self.num_gone = 0
        self._files: dict[bytes, np.ndarray] = {} if before is None else before._files
        self.contents: dict[bytes, BlockContent] = {} if before is None else before.contents
        """What the key of each file stands for."""
        self.jobs: list[ReadJob | WriteJob] = []
        """Those that have not ended."""
        self._changes: list[FileChange] | None = None
        """Not reported yet; None: nobody asks."""
        self._order = Random(seed)

    def has(self, key: bytes) -> bool:
        return key in self._files

    @property
    def index(self) -> Container[bytes]:
        return self._files

    def use(self, keys: Sequence[bytes]) -> None:
        pass

    def list_files(self) -> None:
        """In any order, as in a folder that was copied."""
        keys = list(self.contents)
        self._order.shuffle(keys)
        self._changes = [*(self._changes or ()), *((key, self.contents[key]) for key in keys)]

    @property
    def has_file_changes(self) -> bool:
        return bool(self._changes)

    def take_file_changes(self, limit: int) -> list[FileChange]:
        changes = self._changes or []
        if self._changes is not None:
            self._changes = changes[limit:]
        return changes[:limit]

    def _note(self, key: bytes, content: BlockContent | None) -> None:
        if content is None:
            self.contents.pop(key, None)
        else:
            self.contents[key] = content
        if self._changes is not None:
            self._changes.append((key, content))

    def read(self, job: ReadJob) -> None:
        self.jobs.append(job)

    def write(self, job: WriteJob) -> None:
        self.jobs.append(job)

    def poll(self, timeout_s: float = 0.0) -> list[ReadJob | WriteJob]:
        if self._files and self._others.random() < self._gone_share:
            self._forget(self._others.choice(list(self._files)))
            self.num_gone += 1
        done = [job for job in self.jobs if self._rng.random() < self._done_share]
        self.jobs = [job for job in self.jobs if job not in done]
        for job in done:
            if isinstance(job, ReadJob):
                self._read(job)
            elif self.is_writing and job.key not in self._files:
                self.is_writing = job.is_written = self._rng.random() > self._full_share
                if job.is_written:
                    self._files[job.key] = self._memory[job.block].copy()
                    self._note(job.key, job.content)
        return done

    def _read(self, job: ReadJob) -> None:
        for key, block in job.blocks:
            if self._rng.random() < 0.05:  # damaged: it is removed, and may have changed the memory
                self._forget(key)
                self._memory[block] = 0xA5
                self.num_damaged += 1
            if key not in self._files:
                return
            self._memory[block] = self._files[key]
            job.num_read += 1
            self.num_read += 1

    def _forget(self, key: bytes) -> None:
        self._files.pop(key, None)
        self._note(key, None)
        self.forgotten.add(key)

    def close(self, timeout_s: float) -> None:
        self.jobs.clear()
