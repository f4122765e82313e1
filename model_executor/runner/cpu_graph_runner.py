"""Recorded decode steps of a CPU: hundreds of operations in one call, without Python or torch between them.

The operations from embedded tokens to logits are recorded once, for the largest batch, with the addresses that they
read and write (csrc/cpu/graph.h). A step writes its inputs to these addresses and runs the operations for its rows.
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
    """Runs decode steps of up to `max_rows` requests. The constructor records the operations."""

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
            model: a model whose layers, except the embedding, are compiled operations (RuntimeError otherwise)
            newest_tokens: int64 [num_rows + 1], newest token of each row
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
            input_ids=rows,  # not read: the recording starts after the embedding
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
        """Kept alive, because the graph holds only their addresses."""
        self._graph = torch.classes.tercet_cpu.Graph()
        self._graph.record(max_rows)
        try:
            self._logits = model.head(model.transform(self._x, model.rotary(positions), batch))
        finally:
            self._graph.finish()

    def run(self, rows: Int32Array, seq_lens: Int32Array, slots: Int32Array) -> DecodeOutputs:
        """Run a decode step."""
        size, positions = len(rows), seq_lens - 1
        self._table[rows, positions] = slots
        self._rotary.cover(int(seq_lens.max()))
        self._inputs[:, :size] = rows, seq_lens, slots, positions
        step_rows = self._rows[:size]
        self._x[:size] = self._embed(self._newest_tokens.index_select(0, step_rows))
        self._graph.run(size)
        return DecodeOutputs(self._logits[:size], step_rows)
