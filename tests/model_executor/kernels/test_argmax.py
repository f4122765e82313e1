from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.argmax import argmax, argmax_ref


@settings(max_examples=examples(100))
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(0, 4),
    vocab=st.sampled_from([1, 2, 300, 4096, 4097, 9000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    kind=st.sampled_from(["random", "ties", "nothing", "nan", "inf"]),
)
def test_is_the_twins(seed, n, vocab, dtype, kind) -> None:
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((n, vocab + 5), torch.inf).to(dtype)
    x = wide[:, :vocab]
    x[:] = torch.randn(n, vocab, generator=g)
    if kind == "ties":
        x.clamp_(max=0)
    elif n and kind != "random":
        value = {"nothing": -torch.inf, "nan": torch.nan, "inf": torch.inf}[kind]
        row = int(torch.randint(n, (), generator=g))
        at = slice(None) if kind == "nothing" else int(torch.randint(vocab, (), generator=g))
        x[row, at] = value
    assert torch.equal(argmax(x), argmax_ref(x))
    rows = torch.randperm(7, generator=g)[:n]
    mine, wanted = torch.arange(100, 107), torch.arange(100, 107)
    assert torch.equal(argmax(x, mine, rows), argmax_ref(x, wanted, rows))
    assert torch.equal(mine, wanted) and not (mine < 0).any()
