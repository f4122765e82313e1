"""Recorded decode steps of a GPU: a CUDA graph replaces hundreds of kernel launches by one.

A graph is recorded for each of a few batch sizes. A step runs on the smallest graph that holds it. Its inputs (rows,
lengths, slots) are copied to the buffers that the graph reads. Padding has row 0, length 1 and slot 0: it reads and
writes only the dummy slot and the dummy's entry of the table.

The graph needs nothing else from the host: it reads the newest tokens, updates the table of slots and numbers the
attention work on the device. Sampling is not in the graph, because it depends on the options of the requests.

A step may have more attention work than its graph has room for. Such a step is padded to the size of the graph, but
launched kernel by kernel. So is every step if graphs are disabled. Libraries choose kernels by the batch size. With the
same padding they choose the same kernels, and the bits are those of the graph.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..attention.base import AttentionBackend
from ..device.accelerator import Accelerator, Graph
from ..device.device_buffers import Uploads
from ..step import Choices, ForwardMode, Int32Array, StepInputs
from .recorded_steps import DecodeInputs, StepHead

logger = logging.getLogger(__name__)

_SMALL_BATCHES = (1, 2, 4)
_STEP, _LARGE, _LARGE_STEP = 8, 128, 16


Decode = Callable[[DecodeInputs, Int32Array, torch.Tensor], object]
"""Queues a decode step: (inputs, seq_lens_host, logits). It writes the logits, float32 [B, vocab].

It may use `seq_lens_host`, int32 [B], only as an upper bound of the attention work."""


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes to record: 1, 2, 4, multiples of 8 up to 128, then multiples of 16, and at last `largest`."""
    sizes = [*_SMALL_BATCHES, *range(_STEP, _LARGE, _STEP), *range(_LARGE, largest, _LARGE_STEP)]
    return [size for size in sizes if size < largest] + [largest]


class CudaGraphRunner:
    """Runs decode steps of up to `max_rows` requests. The constructor records the graphs."""

    def __init__(
        self,
        accelerator: Accelerator,
        uploads: Uploads,
        decode: Decode,
        attention: AttentionBackend,
        *,
        sizes: Sequence[int],
        pool_tokens: int,
        context_len: int,
        logits: torch.Tensor,
        record: bool,
    ) -> None:
        """
        Args:
            decode: queues a step; must use nothing from the host except its arguments
            attention: the backend that `decode` uses; must support recorded steps (`num_splits`)
            sizes: batch sizes, ascending
            pool_tokens: size of the KV pool; with context_len it bounds the attention work of a graph
            logits: float32 [largest size, vocab], the output of all steps
            record: False launches each step kernel by kernel
        """
        self._uploads = uploads
        self._decode = decode
        self._attention = attention
        self._sizes = list(sizes)
        self.max_rows = self._sizes[-1]
        self._logits = logits
        self._inputs = torch.zeros(3 * self._sizes[-1], dtype=torch.int64, device=logits.device)
        self._graphs: dict[int, Graph] = {}
        self._room: dict[int, int] = {}
        self.num_bytes = 0
        """device memory of the graphs"""
        if not record:
            return
        started, available = time.monotonic(), accelerator.memory().available
        # The largest first: the memory pool that it fills is large enough for all others.
        for size in reversed(self._sizes):
            self._record(size, accelerator, max_work_lens(size, pool_tokens, context_len))
        self.num_bytes = max(0, available - accelerator.memory().available)
        logger.info(
            "Recorded %d CUDA graphs for up to %d requests in %.1f s, %.0f MiB",
            len(self._sizes), self._sizes[-1], time.monotonic() - started, self.num_bytes / 2**20,
        )  # fmt: skip

    def _record(self, size: int, accelerator: Accelerator, lens: Int32Array) -> None:
        inputs = self._inputs_of(size)
        # Recording also runs the work once, on padding.
        inputs.rows.zero_()
        inputs.seq_lens.fill_(1)
        inputs.slots.zero_()
        self._room[size] = self._work(lens)
        self._graphs[size] = accelerator.record(lambda: self._decode(inputs, lens, self._logits[:size]))

    def _work(self, seq_lens: Int32Array) -> int:
        num_splits = self._attention.num_splits(seq_lens)
        assert num_splits is not None, f"steps on {self._attention.name} attention cannot be recorded"
        return num_splits

    def _inputs_of(self, size: int) -> DecodeInputs:
        """The input buffers of the graph of this batch size. They are contiguous, so one copy fills them."""
        return DecodeInputs(*self._inputs[: 3 * size].view(3, size))

    def can_run(self, step: StepInputs) -> bool:
        """Decode steps can be run, up to the largest batch size."""
        return step.mode is ForwardMode.DECODE and len(step.rows) <= self.max_rows

    def run(self, step: StepInputs, choices: Choices | None) -> StepHead:
        """Queue a decode step, padded to the smallest batch size that holds it."""
        count = len(step.rows)
        size = next(size for size in self._sizes if size >= count)
        packed = np.zeros((3, size), np.int64)
        packed[1, count:] = 1
        packed[:, :count] = step.rows, step.seq_lens, step.out_cache_loc
        # The stream orders this copy after the previous step, which reads the same buffers.
        self._uploads.send_to(self._inputs[: 3 * size], packed.reshape(-1))
        inputs, lens = self._inputs_of(size), packed[1].astype(np.int32)
        if size in self._graphs and self._work(lens) <= self._room[size]:
            self._graphs[size].replay()
        else:
            self._decode(inputs, lens, self._logits[:size])
        return StepHead(inputs.rows[:count], lambda: self._logits[:count])


def max_work_lens(size: int, pool_tokens: int, context_len: int) -> Int32Array:
    """Sequence lengths with the most attention work that a graph has room for: int32 [size].

    They sum to twice the tokens of the pool, in as few requests as the context length allows. Requests that share long
    prefixes can need more. Their step then takes so long that launching its kernels one by one hardly matters.
    """
    tokens = 2 * pool_tokens
    lens = np.ones(size, np.int32)
    num_full = min(size, tokens // context_len)
    lens[:num_full] = context_len
    lens[num_full : num_full + 1] = max(1, tokens - num_full * context_len)
    return lens
