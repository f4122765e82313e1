"""Drawn logits, parameters and edits for tests of the sampling kernels."""

from __future__ import annotations

import numpy as np
import torch

from tercet.model_executor.kernels.logit_edits import EditTables
from tercet.model_executor.kernels.sampling import choose_tokens
from tercet.model_executor.kernels.sampling_layout import Column, Field
from tercet.model_executor.kernels.sampling_ref import choose_tokens_ref

EDITS = (Field.COUNTS, Field.BIAS, Field.MASK)


def numpys_weights(gap: torch.Tensor) -> torch.Tensor:
    """Weights by the interpreter's exp, so that tokens can be compared and not only distributions."""
    one = np.float32(2**34)
    return torch.from_numpy((np.exp(-gap.numpy()) * one + np.float32(0.5)).astype(np.int64))


class Rows:
    """Drawn logits, parameters and edits of n rows."""

    def __init__(self, seed: int, n: int, vocab: int, kind: str) -> None:
        self.g = g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, vocab, generator=g) * 4
        if kind == "ties":
            x = x.round()
        elif kind == "equal":
            x[:] = 1.5
        elif kind == "flat":
            x = x * 0.01
        elif kind == "banned":
            x[:, 1:].masked_fill_(torch.rand(n, vocab - 1, generator=g) < 0.8, -torch.inf)
        elif kind == "zeros":  # of both signs, and the best
            x = x.clamp(max=0.0) * torch.tensor([1.0, 0.0])[torch.randint(0, 2, x.shape, generator=g)]
            x = torch.where(torch.rand(n, vocab, generator=g) < 0.3, x.abs() * 0, x)
        elif kind == "broken":
            x[0] = -torch.inf
            x[-1, self.ids(vocab, ())] = torch.nan
        self.x = x
        self.n, self.vocab = n, vocab
        self.table = torch.zeros((n + 3, len(Column)), dtype=torch.float64)
        some = torch.rand(n + 3, len(Column), generator=g)
        self.table[:, Column.TEMPERATURE] = some[:, 0] * 1.5 + 0.1
        self.table[:, Column.TOP_K] = torch.where(some[:, 1] < 0.5, vocab, self.ids(vocab, (n + 3,)) + 1)
        top_p = torch.rand(n + 3, generator=g, dtype=torch.float64)
        self.table[:, Column.TOP_P] = torch.where(some[:, 2] < 0.4, 1.0, top_p)
        self.table[:, Column.MAX_GAP] = torch.where(some[:, 3] < 0.5, torch.inf, some[:, 6] * 5)
        self.table[:, Column.REPETITION] = torch.where(some[:, 4] < 0.3, 1.0, some[:, 4] * 2)
        self.table[:, Column.FREQUENCY] = some[:, 5] - 0.5
        self.table[:, Column.PRESENCE] = some[:, 6] - 0.5
        self.table[:, Column.GREEDY] = (some[:, 7] < 0.2).double()
        self.plan = torch.full((n, len(Field)), -1, dtype=torch.int64)
        self.plan[:, Field.ROW] = torch.randperm(n + 3, generator=g)[:n]
        draw = torch.rand(n, generator=g, dtype=torch.float64)
        extreme = torch.rand(n, generator=g)
        draw[extreme < 0.1] = 0.0
        draw[extreme > 0.9] = 1 - 2.0**-53
        self.plan[:, Field.DRAW] = draw.view(torch.int64)
        self._add_edits()

    def ids(self, limit: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=self.g)

    def _add_edits(self) -> None:
        n, vocab, g = self.n, self.vocab, self.g
        for field in EDITS:
            self.plan[:, field] = torch.where(torch.rand(n, generator=g) < 0.4, torch.randperm(n, generator=g), -1)
        lens = torch.where(torch.rand(n, generator=g) < 0.3, self.ids(4, (n,)), 0)
        ends = lens.cumsum(0)
        self.plan[:, Field.STOPS_START], self.plan[:, Field.STOPS_END] = ends - lens, ends
        edited = (lens > 0) | (self.plan[:, list(EDITS)] >= 0).any(1)
        self.num_edited = int(edited.sum())
        self.plan[edited, Field.EDITED] = torch.arange(self.num_edited)
        bits = self.ids(2**32, (n, -(-vocab // 32))).to(torch.int32)
        bits[:, 0] |= 1
        self.edits = EditTables(
            torch.where(torch.rand(n, vocab, generator=g) < 0.5, self.ids(8, (n, vocab)), 0).to(torch.int32),
            torch.randn(n, vocab, generator=g),
            self.ids(vocab, (int(lens.sum()),)),
            bits,
        )

    def chosen(self, pick: slice = slice(None), num_candidates: int = 4096) -> tuple[torch.Tensor, ...]:
        """The tokens of some lines, and after them the counts of tokens and the newest token of each row."""
        counts, newest = self.edits.counts.clone(), torch.arange(100, 100 + len(self.table))
        before = self.x.clone()
        sampled = self.table[self.plan[:, Field.ROW]][self.table[self.plan[:, Field.ROW], Column.GREEDY] == 0]
        ranked = (sampled[:, Column.TOP_K] < self.vocab) | (sampled[:, Column.TOP_P] < 1)
        tokens = choose_tokens(
            self.x[pick], self.table, self.plan[pick].contiguous(), self.edits._replace(counts=counts),
            num_edited=self.num_edited, any_sampled=len(sampled) > 0, any_ranked=bool(ranked.any()),
            newest_tokens=newest, num_candidates=num_candidates,
        )  # fmt: skip
        assert torch.equal(self.x.view(torch.int32), before.view(torch.int32)), "the logits are the model's"
        return tokens, counts, newest

    def expected(self) -> tuple[torch.Tensor, ...]:
        counts, newest = self.edits.counts.clone(), torch.arange(100, 100 + len(self.table))
        edits = self.edits._replace(counts=counts)
        return choose_tokens_ref(self.x, self.table, self.plan, edits, numpys_weights, newest), counts, newest
