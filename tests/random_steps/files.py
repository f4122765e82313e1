"""Files of KV blocks in memory, without a thread, so that a case runs the same way each time."""

from __future__ import annotations

from random import Random

import numpy as np

from tercet.mem_cache.block_keys import BlockContent
from tercet.mem_cache.kv_storage import FileChange, ReadJob, WriteJob


class FakeStorage:
    """A KVStorage whose jobs take a random number of polls. Some reads find damaged files, and writing may fail."""

    def __init__(self, memory: np.ndarray, seed: int) -> None:
        """`memory`: uint8 [num_blocks, block_bytes]."""
        self.is_writing = True
        self.files = self
        self.used_bytes = self.max_bytes = self.num_damaged = self.num_removed = 0
        self._memory = memory
        self._rng = Random(seed)
        self._files: dict[bytes, np.ndarray] = {}
        self._jobs: list[ReadJob | WriteJob] = []
        self.contents: dict[bytes, BlockContent] = {}
        """What the key of each file stands for."""
        self._changes: list[FileChange] | None = None
        """Not reported yet; None: nobody asks."""
        self._order = Random(seed)

    def has(self, key: bytes) -> bool:
        return key in self._files

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
        self._jobs.append(job)

    def write(self, job: WriteJob) -> None:
        self._jobs.append(job)

    def poll(self, timeout_s: float = 0.0) -> list[ReadJob | WriteJob]:
        done = [job for job in self._jobs if self._rng.random() < 0.5]
        self._jobs = [job for job in self._jobs if job not in done]
        for job in done:
            if isinstance(job, ReadJob):
                self._read(job)
            elif self.is_writing and job.key not in self._files:
                self._files[job.key] = self._memory[job.block].copy()
                self._note(job.key, job.content)
                job.is_written = True
                self.is_writing = self._rng.random() > 0.005
        return done

    def _read(self, job: ReadJob) -> None:
        for key, block in job.blocks:
            if self._rng.random() < 0.05:  # damaged: it is removed, and may have changed the memory
                self._files.pop(key, None)
                self._note(key, None)
                self._memory[block] = 0xA5
            if key not in self._files:
                return
            self._memory[block] = self._files[key]
            job.num_read += 1

    def close(self, timeout_s: float) -> None:
        self._jobs.clear()
