from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.sampling import sample_open, sample_ranked, sample_ref


def numpys_weights(gap: torch.Tensor) -> torch.Tensor:
    """Weights by the interpreter's exp, so that tokens can be compared and not only distributions."""
    one = np.float32(2**34)
    return torch.from_numpy((np.exp(-gap.numpy()) * one + np.float32(0.5)).astype(np.int64))


class Rows:
    """Drawn logits and parameters of n rows."""

    def __init__(self, seed: int, n: int, vocab: int, kind: str) -> None:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, vocab, generator=g) * 4
        if kind == "ties":
            x = x.round()
        elif kind == "flat":
            x = x * 0.01
        elif kind == "banned":
            x[:, 1:].masked_fill_(torch.rand(n, vocab - 1, generator=g) < 0.8, -torch.inf)
        elif kind == "zeros":  # of both signs, and the best
            x = x.clamp(max=0.0) * torch.tensor([1.0, 0.0])[torch.randint(0, 2, x.shape, generator=g)]
            x = torch.where(torch.rand(n, vocab, generator=g) < 0.3, x.abs() * 0, x)
        elif kind == "bf16":
            x = x.bfloat16()
        self.x = x
        self.peak = x.float().amax(-1)
        self.temperature = torch.rand(n, generator=g) * 1.5 + 0.1
        some = torch.rand(n, 4, generator=g)
        self.top_k = torch.where(some[:, 0] < 0.5, vocab, torch.randint(1, vocab + 1, (n,), generator=g))
        self.top_p = torch.where(some[:, 1] < 0.4, 1.0, torch.rand(n, generator=g, dtype=torch.float64))
        self.max_gap = torch.where(some[:, 2] < 0.5, torch.inf, torch.rand(n, generator=g) * 5)
        self.draw = torch.rand(n, generator=g, dtype=torch.float64)
        self.draw[some[:, 3] < 0.1] = 0.0
        self.draw[some[:, 3] > 0.9] = 1 - 2.0**-53

    def ranked(self, pick: slice = slice(None), num_candidates: int = 4096) -> torch.Tensor:
        t = (self.x, self.peak, self.temperature, self.top_k, self.top_p, self.max_gap, self.draw)
        return sample_ranked(*(a[pick] for a in t), num_candidates=num_candidates)

    def expected(self, ranked: bool) -> torch.Tensor:
        top = (self.top_k, self.top_p) if ranked else (None, None)
        return sample_ref(self.x, self.peak, self.temperature, *top, self.max_gap, self.draw, numpys_weights)


KINDS = st.sampled_from(["random", "ties", "flat", "banned", "zeros", "bf16"])


@settings(max_examples=examples(45))
@given(seed=st.integers(0, 2**31), vocab=st.integers(1, 300), kind=KINDS, candidates=st.sampled_from([8, 64, 4096]))
def test_the_ranked_draw_is_the_sorting_twins(seed: int, vocab: int, kind: str, candidates: int) -> None:
    rows = Rows(seed, 2, vocab, kind)
    assert torch.equal(rows.ranked(num_candidates=candidates), rows.expected(ranked=True))


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**31), vocab=st.integers(1, 5000), kind=KINDS)
def test_the_open_draw_is_the_twins(seed: int, vocab: int, kind: str) -> None:
    rows = Rows(seed, 2, vocab, kind)
    tokens = sample_open(rows.x, rows.peak, rows.temperature, rows.max_gap, rows.draw)
    assert torch.equal(tokens, rows.expected(ranked=False))


def test_a_row_does_not_depend_on_the_others() -> None:
    rows = Rows(3, 4, 200, "random")
    everyone = rows.ranked()
    for i in range(4):
        assert torch.equal(rows.ranked(slice(i, i + 1)), everyone[i : i + 1])


def test_top_k_of_one_is_greedy_and_draws_only_what_is_kept() -> None:
    rows = Rows(4, 3, 100, "random")
    rows.top_k[:] = 1
    rows.max_gap[:] = torch.inf
    assert torch.equal(rows.ranked(), rows.x.argmax(-1))


def test_rows_without_a_token_answer_minus_one() -> None:
    rows = Rows(5, 3, 100, "random")
    rows.x[0], rows.x[1, 50] = -torch.inf, torch.nan
    rows.peak = rows.x.amax(-1)
    for tokens in (rows.ranked(), sample_open(rows.x, rows.peak, rows.temperature, rows.max_gap, rows.draw)):
        assert tokens[:2].tolist() == [-1, -1] and tokens[2] >= 0
