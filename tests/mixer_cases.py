"""Requests whose tokens a mixer computes in random steps. The tokens have scattered slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tercet.model_executor.forward_batch import ForwardBatch, SavedStates
from tercet.model_executor.step import ForwardMode

Layer = Callable[[torch.Tensor, None, ForwardBatch], torch.Tensor]
Chunk = tuple[int, int, int]
"""A request, and its first new token and the one after its last."""


class MixerCase:
    """The inputs of requests, and their rows and slots."""

    def __init__(
        self, seed: int, dtype: torch.dtype, columns: int, lens: Sequence[int], *, whole_numbers: bool, device: str
    ) -> None:
        """`columns`: those of an input. `whole_numbers`: `draw` draws small whole numbers."""
        self._generator = torch.Generator().manual_seed(seed)
        self._whole_numbers = whole_numbers
        self.lens, self.dtype, self.columns, self.device = list(lens), dtype, columns, device
        self.projected = [self.draw(length, columns) for length in lens]
        self.num_slots = 2 * sum(lens) + 3
        slots = torch.randperm(self.num_slots, generator=self._generator)[: sum(lens)] + 1
        self.slots = slots.to(device).split(self.lens)
        self.num_rows = len(lens) + 2
        self.rows = torch.randperm(self.num_rows, generator=self._generator)[: len(lens)].to(device) + 1
        self.table = torch.full((self.num_rows + 1, max(lens) + 1), 10**9, dtype=torch.int32, device=device)
        self.table[0] = 0
        for row, own in zip(self.rows.tolist(), self.slots, strict=True):
            self.table[row, : len(own)] = own.int()

    def draw(self, *shape: int) -> torch.Tensor:
        """Random numbers of the case's type."""
        g = self._generator
        drawn = torch.randint(-2, 3, shape, generator=g) if self._whole_numbers else torch.randn(shape, generator=g)
        return drawn.to(self.device, self.dtype)

    def run(
        self,
        layer: Layer,
        chunks: Sequence[Chunk],
        *,
        decode: bool = False,
        num_padded: int = 0,
        saved: Sequence[tuple[int, int]] | None = None,
    ) -> list[torch.Tensor]:
        """One step: the outputs of each chunk. `decode`: a decode step, with so many rows of padding. `saved`: of each
        chunk, after how many tokens its state is saved, and the row."""
        requests, starts, ends = zip(*chunks, strict=True)
        sizes = [end - start for _, start, end in chunks]

        def joined(parts: Sequence[torch.Tensor], padding: torch.Tensor | None = None) -> torch.Tensor:
            padding = torch.zeros(num_padded, dtype=torch.int64, device=self.device) if padding is None else padding
            return torch.cat([*(parts[k][start:end] for k, start, end in chunks), padding])

        def padded(values: Sequence[int], padding: int) -> torch.Tensor:
            return torch.tensor([*values, *[padding] * num_padded], device=self.device)

        loose = torch.full((num_padded, self.columns), torch.nan, dtype=self.dtype, device=self.device)
        rows = torch.cat([self.rows[list(requests)], torch.zeros(num_padded, dtype=torch.int64, device=self.device)])
        positions = [torch.arange(length, device=self.device) for length in self.lens]
        batch = ForwardBatch(
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            rows=rows,
            seq_lens=padded(ends, 1),
            input_ids=torch.empty(0, dtype=torch.int64),
            positions=joined(positions),
            out_cache_loc=joined(self.slots),
            req_to_token=self.table,
            logits_indices=None,
            extend_start_loc=None if decode else padded([0, *np.cumsum(sizes).tolist()], 0),
            prefix_lens=None if decode else padded(starts, 0),
            seq_lens_host=np.array([*ends, *[1] * num_padded], np.int32),
            extend_lens_host=None if decode else np.array(sizes, np.int32),
            saved_states=None
            if saved is None
            else SavedStates(*torch.tensor(saved, device=self.device).t().contiguous()),
        )
        out = layer(joined(self.projected, loose), None, batch)
        return list(out.split([*sizes, num_padded]))[: len(chunks)]

    def random_steps(self, seed: int, longest: int = 4) -> Iterator[tuple[list[Chunk], bool]]:
        """The chunks of each step, and whether it is a decode step, until all requests have ended. `longest`: most
        tokens of a chunk."""
        rng = np.random.default_rng(seed)
        done = [0] * len(self.lens)
        while True:
            left = [k for k, length in enumerate(self.lens) if done[k] < length]
            if not left:
                return
            decode = bool(rng.random() < 0.5)
            some = rng.permutation(left)[: rng.integers(1, len(left) + 1)].tolist()
            ends = [min(self.lens[k], done[k] + (1 if decode else int(rng.integers(1, longest + 1)))) for k in some]
            yield [(k, done[k], end) for k, end in zip(some, ends, strict=True)], decode
            for k, end in zip(some, ends, strict=True):
                done[k] = end
