"""Decode steps as CUDA graphs: hundreds of kernel launches become one.

A graph is recorded for each of a few batch sizes, and a step runs on the smallest that holds it. What a step brings
(rows, lengths, slots) is copied to where the graph reads it; what is left of the batch is filled with row 0, of length
1, at slot 0: padding reads and writes the dummy slot, the dummy's entry of the table, and nobody's KV.

From there on nothing is needed from the host: the newest tokens, the table of slots and the numbering of attention
work are read and written inside the graph. Choosing the next tokens is not part of it: that depends on what requests
ask for.

A step that no graph has room for, or any step where graphs are switched off, is padded to the same size and launched
kernel by kernel: libraries choose their kernels by the size of the batch, so the bits are those of the graph.
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
from ..step import Int32Array
from .decode_runner import DecodeInputs, DecodeOutputs

logger = logging.getLogger(__name__)

_SMALL_BATCHES = (1, 2, 4)
_STEP, _LARGE, _LARGE_STEP = 8, 128, 16


Decode = Callable[[DecodeInputs, Int32Array, torch.Tensor], object]
"""Queues a decode step. Of `seq_lens_host`, int32 [B], only the amount of work may be taken, as an upper bound; logits
go to the last argument, float32 [B, vocab]."""


def batch_sizes(largest: int) -> list[int]:
    """Batch sizes to record, ascending: 1, 2, 4, 8, from there in steps of 8, from 128 of 16; `largest` is the last."""
    sizes = [*_SMALL_BATCHES, *range(_STEP, _LARGE, _STEP), *range(_LARGE, largest, _LARGE_STEP)]
    return [size for size in sizes if size < largest] + [largest]


class CudaGraphRunner:
    """Runs decode steps of up to the largest size. Records on construction."""

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
        record: bool = True,
    ) -> None:
        """
        Args:
            decode: queues a step; must do so with nothing from the host but what it is given
            attention: of `decode`; one whose steps may be recorded (`num_splits`)
            sizes: batch sizes, ascending
            pool_tokens: of the KV pool; with context_len it bounds the work that a graph has room for
            logits: float32 [largest size, vocab], where all steps leave theirs
            record: False launches every step kernel by kernel
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
        """device memory that the graphs took"""
        if not record:
            return
        started, available = time.monotonic(), accelerator.memory().available
        # The largest first: what it takes of the shared memory is enough for all the others.
        for size in reversed(self._sizes):
            self._record(size, accelerator, longest_lens(size, pool_tokens, context_len))
        self.num_bytes = max(0, available - accelerator.memory().available)
        logger.info(
            "Recorded %d CUDA graphs for up to %d requests in %.1f s, %.0f MiB",
            len(self._sizes), self._sizes[-1], time.monotonic() - started, self.num_bytes / 2**20,
        )  # fmt: skip

    def _record(self, size: int, accelerator: Accelerator, lens: Int32Array) -> None:
        inputs = self._inputs_of(size)
        # Recording does the work once for real: as padding.
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
        """Where the graph of this batch size reads: next to one another, so that one copy fills them."""
        return DecodeInputs(*self._inputs[: 3 * size].view(3, size))

    def run(self, rows: Int32Array, seq_lens: Int32Array, slots: Int32Array) -> DecodeOutputs:
        """Queues the step, padded to the smallest recorded size that holds it."""
        count = len(rows)
        size = next(size for size in self._sizes if size >= count)
        packed = np.zeros((3, size), np.int64)
        packed[1, count:] = 1
        packed[:, :count] = rows, seq_lens, slots
        # The step before has read its inputs when this copy arrives: both are on one stream.
        self._uploads.send_to(self._inputs[: 3 * size], packed.reshape(-1))
        inputs, lens = self._inputs_of(size), packed[1].astype(np.int32)
        if size in self._graphs and self._work(lens) <= self._room[size]:
            self._graphs[size].replay()
        else:
            self._decode(inputs, lens, self._logits[:size])
        return DecodeOutputs(self._logits[:count], inputs.rows[:count])


def longest_lens(size: int, pool_tokens: int, context_len: int) -> Int32Array:
    """Lengths that stand for the attention work which a graph has room for: int32 [size].

    Twice what the pool holds, in as few requests as the context allows. Requests that share long prefixes can be more
    work than that; they are so much that launching the kernels one by one costs nothing beside them.
    """
    tokens = 2 * pool_tokens
    lens = np.ones(size, np.int32)
    num_full = min(size, tokens // context_len)
    lens[:num_full] = context_len
    lens[num_full : num_full + 1] = max(1, tokens - num_full * context_len)
    return lens
