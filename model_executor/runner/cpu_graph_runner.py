"""Recorded steps of a CPU: hundreds of operations in one call, without Python or torch between them.

The operations from embedded tokens to hidden states are recorded once, for the largest step, with the addresses that
they read and write (csrc/cpu/graph.h). A step writes its inputs to these addresses and runs the operations for its
tokens, its requests and its sampled rows. A decode step is one with a new token in each request.

The recording has two endings: logits, or only the most probable tokens. The choice of the next tokens runs one of them.
"""

from __future__ import annotations

import numpy as np
import torch

from ..forward_batch import ForwardBatch
from ..layers.output_head import GreedyHead
from ..models.family import Model
from ..step import FROM_DEVICE, ForwardMode, StepInputs
from .recorded_steps import StepHead
from .slot_table import SlotTable

_LOGITS, _GREEDY = 0, 1
"""The endings of the recording."""


class CpuGraphRunner:
    """Runs steps of up to `max_tokens` new tokens in up to `max_rows` requests. The constructor records the
    operations."""

    def __init__(
        self,
        model: Model,
        *,
        max_tokens: int,
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
        self._newest_tokens = newest_tokens.numpy()
        self._table = table.tensor.numpy()
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.num_bytes = 0
        of_tokens = torch.zeros((2, max_tokens), dtype=torch.int64)
        of_requests = torch.zeros((4, max_rows), dtype=torch.int64)
        starts = torch.zeros(max_rows + 1, dtype=torch.int64)
        slots, positions = of_tokens
        rows, seq_lens, selected, self._sampled_rows = of_requests
        self._of_tokens, self._of_requests, self._starts = of_tokens.numpy(), of_requests.numpy(), starts.numpy()
        self._x = torch.zeros((max_tokens, hidden_size), dtype=dtype)
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=seq_lens,
            input_ids=slots,  # not read: the recording starts after the embedding
            positions=positions,
            out_cache_loc=slots,
            req_to_token=table.tensor,
            logits_indices=selected,
            extend_start_loc=starts,
            prefix_lens=None,
            seq_lens_host=np.zeros(max_rows, np.int32),
            extend_lens_host=None,
        )
        self._kept = model, batch
        """Kept alive, because the graph holds only their addresses."""
        assert isinstance(model.head, GreedyHead), "all compiled layers have one"
        self._graph = torch.classes.tercet_cpu.Graph()
        self._graph.record(max_tokens, max_rows, max_rows)
        try:
            hidden = model.head.normalise(model.transform(self._x, model.rotary(positions), batch))
            self._graph.begin_ending()
            self._logits = model.head.of_hidden(hidden)
            self._graph.begin_ending()
            self._tokens = model.head.greedy(hidden)
        finally:
            self._graph.finish()

    def can_run(self, step: StepInputs) -> bool:
        """Steps that return only tokens can be run, up to the recorded sizes."""
        return step.num_tokens <= self.max_tokens and len(step.rows) <= self.max_rows and not step.has_extras

    def run(self, step: StepInputs) -> StepHead:
        """Run a step up to its hidden states."""
        num_tokens, num_requests = step.num_tokens, len(step.rows)
        starts, positions = step.starts, step.positions
        if step.mode is ForwardMode.DECODE:
            token_rows = sampled_rows = step.rows
            ids, selected = self._newest_tokens[token_rows], starts[:-1]
        else:
            assert step.extend_lens is not None and step.input_ids is not None and step.sampled is not None
            token_rows = np.repeat(step.rows, step.extend_lens)
            ids = np.where(step.input_ids == FROM_DEVICE, self._newest_tokens[token_rows], step.input_ids)
            selected, sampled_rows = (starts[1:] - 1)[step.sampled], step.rows[step.sampled]
        num_sampled = len(selected)
        self._table[token_rows, positions] = step.out_cache_loc
        self._rotary.cover(int(step.seq_lens.max()))
        self._of_tokens[:, :num_tokens] = step.out_cache_loc, positions
        self._of_requests[:2, :num_requests] = step.rows, step.seq_lens
        self._of_requests[2:, :num_sampled] = selected, sampled_rows
        self._starts[: num_requests + 1] = starts
        self._x[:num_tokens] = self._embed(torch.from_numpy(ids))
        self._graph.run(num_tokens, num_requests, num_sampled)

        def end(ending: int, output: torch.Tensor) -> torch.Tensor:
            self._graph.run_ending(ending)
            return output[:num_sampled]

        return StepHead(
            self._sampled_rows[:num_sampled],
            lambda: end(_LOGITS, self._logits),
            lambda: end(_GREEDY, self._tokens).clone(),  # the next step may be launched before the tokens are read
        )
