from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.token_logprobs import token_logprobs, token_logprobs_ref
from tercet.model_executor.sampling.token_logprobs import with_torch, with_triton


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    n=st.integers(0, 4),
    m=st.sampled_from([1, 2, 127, 130]),
    vocab=st.sampled_from([1, 2, 300, 4096, 4097, 9000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    kind=st.sampled_from(["random", "large", "mostly nothing", "nan", "inf"]),
)
def test_is_the_twins(seed, rows, n, m, vocab, dtype, kind) -> None:
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, vocab + 5), torch.inf).to(dtype)
    x = wide[:, :vocab]
    x[:] = torch.randn(rows, vocab, generator=g) * (1000 if kind == "large" else 3)
    if kind == "mostly nothing":
        x[:, 1:] = -torch.inf
    elif kind in ("nan", "inf"):
        x[int(torch.randint(rows, (), generator=g)), int(torch.randint(vocab, (), generator=g))] = float(kind)
    lines, ids = torch.randint(rows, (n,), generator=g), torch.randint(vocab, (n, m), generator=g)
    found, expected = token_logprobs(x, lines, ids), token_logprobs_ref(x, lines, ids)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_with_the_most_probable_tokens() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    lines, ids = torch.tensor([2, 0]), torch.tensor([[4, 7], [1, 4999]])
    for k in (0, 30):
        found, expected = with_triton(logits, lines, ids, k), with_torch(logits, lines, ids, k)
        assert torch.equal(found.top_ids, expected.top_ids)
        torch.testing.assert_close(found.given, expected.given)
        torch.testing.assert_close(found.top, expected.top)
