"""Decode steps of a CPU as one call: hundreds of operations without Python or torch between them.

The layers, from embedded tokens to logits, are recorded once, for the largest batch (csrc/cpu/graph.h): every operation
with the addresses that it reads and writes. A step fills in what it brings and performs them for the rows that it has.
"""

from __future__ import annotations

import numpy as np
import torch

from ..forward_batch import ForwardBatch
from ..models.family import Model
from ..step import ForwardMode, Int32Array
from .decode_runner import DecodeOutputs
from .slot_table import SlotTable


class CpuGraphRunner:
    """Runs decode steps of up to `max_rows` requests. Records on construction."""

    def __init__(
        self,
        model: Model,
        *,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        newest_tokens: torch.Tensor,
        table: SlotTable,
    ) -> None:
        """
        Args:
            model: its layers, the embedding aside, are compiled operations (RuntimeError otherwise)
            newest_tokens: int64 [num_rows + 1]
        """
        self._embed = model.embed_tokens
        self._rotary = model.rotary
        self._newest_tokens = newest_tokens
        self._table = table.tensor.numpy()
        self.max_rows = max_rows
        self.num_bytes = 0
        inputs = torch.zeros((4, max_rows), dtype=torch.int64)
        rows, seq_lens, slots, positions = inputs
        self._inputs, self._rows = inputs.numpy(), rows
        self._x = torch.zeros((max_rows, hidden_size), dtype=dtype)
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            rows=rows,
            seq_lens=seq_lens,
            input_ids=rows,  # embedded before
            positions=positions,
            out_cache_loc=slots,
            req_to_token=table.tensor,
            logits_indices=None,
            extend_start_loc=None,
            prefix_lens=None,
            seq_lens_host=np.zeros(max_rows, np.int32),
            extend_lens_host=None,
        )
        self._kept = model, batch
        """The graph knows addresses only."""
        self._graph = torch.classes.tercet_cpu.Graph()
        self._graph.record(max_rows)
        try:
            self._logits = model.logits(model.transform(self._x, positions, batch))
        finally:
            self._graph.finish()

    def run(self, rows: Int32Array, seq_lens: Int32Array, slots: Int32Array) -> DecodeOutputs:
        """Performs the step."""
        size, positions = len(rows), seq_lens - 1
        self._table[rows, positions] = slots
        self._rotary.cover(int(seq_lens.max()))
        self._inputs[:, :size] = rows, seq_lens, slots, positions
        step_rows = self._rows[:size]
        self._x[:size] = self._embed(self._newest_tokens.index_select(0, step_rows))
        self._graph.run(size)
        return DecodeOutputs(self._logits[:size], step_rows)
