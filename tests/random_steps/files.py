"""Files of KV blocks in memory, without a thread, so that a case runs the same way each time."""

from __future__ import annotations

from random import Random

import numpy as np

from tercet.mem_cache.kv_storage import ReadJob, WriteJob


class FakeStorage:
    """A KVStorage whose jobs take a random number of polls. Some reads find damaged files, and the disk may be full."""

    def __init__(self, memory: np.ndarray, seed: str, saved: dict[bytes, np.ndarray]) -> None:
        """`memory`: uint8 [num_blocks, block_bytes]. `saved`: the files, which outlive an engine."""
        self.is_writing = True
        self.files = self
        self.used_bytes = self.max_bytes = self.num_damaged = self.num_removed = self.num_read = 0
        self._memory = memory
        self._rng = Random(seed)
        self._done_share = self._rng.choice([0.5, 0.5, 0.02])
        """Probability that a poll returns a job. A slow disk lets requests wait until they compute KV themselves."""
        self._full_share = self._rng.choice([0.005, 0.1])
        """Probability that a write finds a full disk."""
        self._files = saved
        self.jobs: list[ReadJob | WriteJob] = []
        """Those that have not ended."""

    def has(self, key: bytes) -> bool:
        return key in self._files

    def read(self, job: ReadJob) -> None:
        self.jobs.append(job)

    def write(self, job: WriteJob) -> None:
        self.jobs.append(job)

    def poll(self, timeout_s: float = 0.0) -> list[ReadJob | WriteJob]:
        done = [job for job in self.jobs if self._rng.random() < self._done_share]
        self.jobs = [job for job in self.jobs if job not in done]
        for job in done:
            if isinstance(job, ReadJob):
                self._read(job)
            elif self.is_writing and job.key not in self._files:
                self.is_writing = job.is_written = self._rng.random() > self._full_share
                if job.is_written:
                    self._files[job.key] = self._memory[job.block].copy()
        return done

    def _read(self, job: ReadJob) -> None:
        for key, block in job.blocks:
            if self._rng.random() < 0.05:  # damaged: it is removed, and may have changed the memory
                self._files.pop(key, None)
                self._memory[block] = 0xA5
                self.num_damaged += 1
            if key not in self._files:
                return
            self._memory[block] = self._files[key]
            job.num_read += 1
            self.num_read += 1

    def close(self, timeout_s: float) -> None:
        self.jobs.clear()
