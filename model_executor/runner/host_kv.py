"""The host's KV memory of a runner, and the copies between it and the KV pool.

The memory is pages in the pool's own layout, so a copy changes no bit. On a GPU it is pinned. Copies to it wait for the
work that is queued, but no later work waits for them; copies from it run beside the work that is queued, and later
work waits for them. So both run beside the forward passes.

Their memory on a GPU is bounded, because the KV pool leaves little: of many copies, a batch waits for an earlier one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ...srt.machine.huge_pages import zeroed
from ..device.accelerator import Accelerator, Event
from ..device.device_buffers import Uploads
from ..step import Int32Array, KVCopies
from .settings import HostKVSettings

_BLOCK_LEN = 64
"""Tokens of a block, rounded up to whole pages. A prefix is saved up to its last whole block."""
_BATCH_BYTES = 32 << 20
"""Most bytes that are gathered at a time, unless a page has more."""
_MAX_FETCHED, _MAX_BROUGHT = 8, 2
"""Batches in the memory of a GPU: on their way to the host, and on their way from it."""


def device_bytes(page_bytes: int) -> int:
    """The device memory in bytes that the copies take on a GPU. `page_bytes`: as of `TokenToKVPool`."""
    # While a batch is gathered, its parts take as much once more.
    return (_MAX_FETCHED + 1 + _MAX_BROUGHT) * _pages_of_batch(page_bytes) * page_bytes


def _pages_of_batch(page_bytes: int) -> int:
    return max(_BATCH_BYTES // page_bytes, 1)


class CopiesUnderWay:
    """The copies of one step on a GPU."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def wait(self) -> None:
        """Wait until all of them are made."""
        for event in self.events:
            event.synchronize()


class HostKV:
    """Host memory of `num_blocks` blocks of `block_len` tokens beside a KV pool."""

    def __init__(
        self, kv_pool: TokenToKVPool, settings: HostKVSettings, uploads: Uploads, accelerator: Accelerator | None
    ) -> None:
        """Raises ValueError for a size that makes no sense, and if the system refuses the memory."""
        pages_per_block = -(-_BLOCK_LEN // kv_pool.page_size)
        self.block_len = pages_per_block * kv_pool.page_size
        block_bytes = pages_per_block * kv_pool.page_bytes
        self.num_blocks = settings.num_bytes // block_bytes
        size = f"--hicache-size {settings.num_bytes / 2**30:.4g}"
        if not self.num_blocks:
            least_gb = math.ceil(block_bytes / 2**30 * 1e4) / 1e4
            raise ValueError(
                f"{size} is less than one block of {self.block_len} tokens; give at least {least_gb:g} (GB)"
            )
        num_tokens = self.num_blocks * self.block_len
        if not settings.has_storage and num_tokens <= kv_pool.size:
            least = (kv_pool.size // self.block_len + 1) * block_bytes
            raise ValueError(
                f"{size} holds {num_tokens} tokens and the KV pool {kv_pool.size}: without --hicache-storage-dir it "
                "must be larger than the pool, because it has a copy of what the pool keeps of finished requests; set "
                f"--hicache-size {math.ceil(least / 2**30 * 1000) / 1000:.3f} or more, or a smaller --max-total-tokens"
            )
        self._kv_pool = kv_pool
        self._uploads = uploads
        self._accelerator = accelerator
        num_bytes = self.num_blocks * block_bytes
        try:
            flat = torch.from_numpy(zeroed(num_bytes)) if accelerator is None else accelerator.pinned_exactly(num_bytes)
        except (MemoryError, OSError) as error:  # OSError: of a limit on the address space
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{size} is too much for this system: {reason}") from error
        self._pages = flat.view(self.num_blocks * pages_per_block, kv_pool.page_bytes)
        self._batch = _pages_of_batch(kv_pool.page_bytes)
        self._fetched: deque[tuple[torch.Tensor, Event]] = deque()
        """Batches on their way to the host, and the events of their ends. They are kept alive until then."""
        self._brought: deque[tuple[torch.Tensor, Event]] = deque()
        """The last batches from the host, and the events behind their writes to the pool."""

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """[num_blocks, block_bytes], the memory itself. A block may be read when the step that fills it has ended."""
        return self._pages.numpy().reshape(self.num_blocks, -1)

    def run(self, copies: KVCopies) -> CopiesUnderWay | None:
        """Queue the copies of a step, before its forward pass. Returns None if they are made already."""
        under_way = None if self._accelerator is None else CopiesUnderWay()
        for out_pages, out_host in self._batches(copies.out_pages, copies.out_host):
            (pages,) = self._uploads.send(out_pages)
            if under_way is None:
                self._pages.index_copy_(0, torch.from_numpy(out_host), self._kv_pool.read_pages(pages))
            else:
                self._fetch(pages, out_host, under_way)
        for in_pages, in_host in self._batches(copies.in_pages, copies.in_host):
            (pages,) = self._uploads.send(in_pages)
            if self._accelerator is None:
                self._kv_pool.write_pages(pages, self._pages.index_select(0, torch.from_numpy(in_host)))
            else:
                self._bring(pages, in_host)
        if under_way is not None:
            assert self._accelerator is not None
            under_way.events.append(self._accelerator.record_event())
        return under_way

    def _fetch(self, pages: torch.Tensor, host: npt.NDArray[np.int64], under_way: CopiesUnderWay) -> None:
        """Copy a batch to the host."""
        assert self._accelerator is not None
        while self._fetched and self._fetched[0][1].query():
            self._fetched.popleft()
        if len(self._fetched) == _MAX_FETCHED:
            self._accelerator.wait_for(self._fetched.popleft()[1])  # its memory serves this batch
        data = self._kv_pool.read_pages(pages)
        for start, end in _runs(host):
            target = self._pages[host[start] : host[start] + end - start]
            under_way.events.append(self._accelerator.fetch(data[start:end], target))
        self._fetched.append((data, under_way.events[-1]))

    def _bring(self, pages: torch.Tensor, host: npt.NDArray[np.int64]) -> None:
        """Copy a batch from the host."""
        assert self._accelerator is not None
        parts = [self._pages[host[start] : host[start] + end - start] for start, end in _runs(host)]
        written = self._brought.popleft()[1] if len(self._brought) == _MAX_BROUGHT else None
        data = self._accelerator.bring(parts, written)
        self._kv_pool.write_pages(pages, data)
        self._brought.append((data, self._accelerator.record_event()))

    def _batches(
        self, first: Int32Array, second: Int32Array
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        for start in range(0, len(first), self._batch):
            stop = start + self._batch
            yield first[start:stop].astype(np.int64), second[start:stop].astype(np.int64)


def _runs(pages: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The ranges [start, end) of indices whose pages are consecutive."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    yield from pairwise(bounds)
