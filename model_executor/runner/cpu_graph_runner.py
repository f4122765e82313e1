"""Recorded steps of a CPU: hundreds of operations in one call, without Python or torch between them.

The operations from token ids to hidden states are recorded once, for the largest step, with the addresses that they
read and write (csrc/cpu/graph.h). A step writes its inputs to these addresses and runs the operations for its tokens,
its requests and its sampled rows. A decode step is one with a new token in each request.

The recording has two endings: logits, or only the most probable tokens. The choice of the next tokens runs one of them.

A call of Python, numpy or torch between two steps takes up to ten times as long as in a loop, because the weights of a
step have displaced its code and data from the caches. So one compiled operation writes all inputs of a decode step, and
the greedy ending also stores the newest tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from ..device.device_buffers import TokenCopy
from ..forward_batch import ForwardBatch, SavedStates, TokenAdapters
from ..layers.output_head import GreedyHead
from ..models.family import Model
from ..step import FROM_DEVICE, Choices, ForwardMode, Int32Array, StepInputs
from .adapters import RowAdapters
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
        newest_tokens: torch.Tensor,
        table: SlotTable,
        row_adapters: RowAdapters | None = None,
    ) -> None:
        """
        Args:
            model: a model whose layers are compiled operations (RuntimeError otherwise)
            newest_tokens: int64 [num_rows + 1], newest token of each row
            row_adapters: the LoRA adapter of each row; None: the model has no adapters
        """
        self._rotary = model.rotary
        self._newest_tokens, self._table = newest_tokens, table.tensor
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.num_bytes = 0
        self._of_tokens = torch.zeros((3, max_tokens), dtype=torch.int64)
        self._of_requests = torch.zeros((4, max_rows), dtype=torch.int64)
        self._starts = torch.zeros(max_rows + 1, dtype=torch.int64)
        self._saved = torch.zeros((2, max_rows), dtype=torch.int64)
        """The fields of SavedStates, all 0 between steps."""
        self._row_adapters = row_adapters
        self._adapters = TokenAdapters(torch.zeros(max_tokens, dtype=torch.int32))
        self._sampled_adapters = TokenAdapters(torch.zeros(max_rows, dtype=torch.int32))
        ids, slots, positions = self._of_tokens
        rows, seq_lens, selected, self._sampled_rows = self._of_requests
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=seq_lens,
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            req_to_token=table.tensor,
            logits_indices=selected,
            extend_start_loc=self._starts,
            prefix_lens=None,
            seq_lens_host=np.zeros(max_rows, np.int32),
            extend_lens_host=None,
            adapters=None if row_adapters is None else self._adapters,
            sampled_adapters=None if row_adapters is None else self._sampled_adapters,
            saved_states=SavedStates(*self._saved),
        )
        self._kept = model, batch
        """Kept alive, because the graph holds only their addresses."""
        assert isinstance(model.head, GreedyHead), "all compiled layers have one"
        self._graph = torch.classes.tercet_cpu.Graph()
        self._graph.record(max_tokens, max_rows, max_rows)
        try:
            hidden = model.head.normalise(model.forward(ids, positions, batch))
            self._graph.begin_ending()
            self._logits = model.head.of_hidden(hidden)
            self._graph.begin_ending()
            tokens = model.head.greedy(hidden)
            torch.ops.tercet_cpu.store_newest(tokens, self._sampled_rows, newest_tokens)
        finally:
            self._graph.finish()
        self._tokens = tokens.numpy()

    def can_run(self, step: StepInputs) -> bool:
        """Steps that return only tokens can be run, up to the recorded sizes."""
        num_rows = max(len(step.rows), step.num_choices)
        return step.num_tokens <= self.max_tokens and num_rows <= self.max_rows and not step.has_extras

    def run(self, step: StepInputs, choices: Choices | None) -> StepHead:
        """Run a step up to its hidden states."""
        longest, num_choices = self._set_decode(step) if choices is None else self._set_extend(step, choices)
        if self._row_adapters is not None:
            self._set_adapters(self._row_adapters.host, step, choices)
        self._rotary.cover(longest)
        saves = step.state_saves
        if saves is not None:
            self._saved.numpy()[:, : len(saves.lens)] = saves.lens, saves.rows
        self._graph.run(step.num_tokens, len(step.rows), num_choices)
        if saves is not None:
            self._saved.zero_()
        rows = self._sampled_rows[:num_choices]
        return StepHead(rows, lambda: self._end_in_logits(num_choices), lambda: self._end_greedy(num_choices))

    def _set_decode(self, step: StepInputs) -> tuple[int, int]:
        """Set the inputs of a decode step. Returns its largest length and the number of tokens to choose."""
        arrays = map(torch.from_numpy, (step.rows, step.seq_lens, step.out_cache_loc))
        kept = self._newest_tokens, self._table, self._of_tokens, self._of_requests, self._starts
        return torch.ops.tercet_cpu.set_decode_inputs(*arrays, *kept), len(step.rows)

    def _set_extend(self, step: StepInputs, choices: Choices) -> tuple[int, int]:
        """Set the inputs of an extend step. Returns as `_set_decode` does."""
        assert step.extend_lens is not None and step.input_ids is not None
        num_requests, starts, positions = len(step.rows), step.starts, step.positions
        token_rows = np.repeat(step.rows, step.extend_lens)
        self._table.numpy()[token_rows, positions] = step.out_cache_loc
        ids = np.where(step.input_ids == FROM_DEVICE, self._newest_tokens.numpy()[token_rows], step.input_ids)
        self._of_tokens.numpy()[:, : len(ids)] = ids, step.out_cache_loc, positions
        of_requests = self._of_requests.numpy()
        of_requests[:2, :num_requests] = step.rows, step.seq_lens
        of_requests[2:, : len(choices.at)] = choices.at, choices.rows
        self._starts.numpy()[: num_requests + 1] = starts
        return int(step.seq_lens.max()), len(choices.at)

    def _set_adapters(self, of_rows: Int32Array, step: StepInputs, choices: Choices | None) -> None:
        """Set the adapters of the tokens of a step, and of the sampled ones."""
        token_rows = step.rows if step.extend_lens is None else np.repeat(step.rows, step.extend_lens)
        sampled_rows = step.rows if choices is None else choices.rows
        self._adapters.slots.numpy()[: len(token_rows)] = of_rows[token_rows]
        self._sampled_adapters.slots.numpy()[: len(sampled_rows)] = of_rows[sampled_rows]

    def _end_in_logits(self, num_choices: int) -> torch.Tensor:
        self._graph.run_ending(_LOGITS)
        return self._logits[:num_choices]

    def _end_greedy(self, num_choices: int) -> TokenCopy:
        self._graph.run_ending(_GREEDY)
        return TokenCopy(self._tokens[:num_choices].astype(np.int32))
