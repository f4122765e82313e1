from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.logprobs import logprobs, logprobs_ref


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(0, 4),
    k=st.integers(1, 6),
    vocab=st.sampled_from([1, 17, 300, 4096, 9000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    magnitude=st.sampled_from([0.1, 3.0, 50.0]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_agrees_with_the_float64_twin(seed, n, k, vocab, dtype, magnitude, banned) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, vocab, generator=g) * magnitude).to(dtype)
    x[:, 1:].masked_fill_(torch.rand(n, vocab - 1, generator=g) < banned, -torch.inf)
    tokens = torch.randint(vocab, (n, k), generator=g)
    reference = logprobs_ref(x.double(), tokens)
    out = logprobs(x, tokens).double()
    assert torch.equal(out.isneginf(), reference.isneginf())
    finite = reference.isfinite()
    assert torch.allclose(out[finite], reference[finite], rtol=1e-6, atol=2e-5)


def test_a_broken_row_says_so_and_leaves_the_others_alone() -> None:
    x = torch.randn(3, 300)
    x[1, 200] = torch.nan
    out = logprobs(x, torch.zeros(3, 2, dtype=torch.int64))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()
