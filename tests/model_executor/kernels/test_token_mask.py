from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.token_mask import apply_masks
from tercet.model_executor.sampling.token_mask import apply_masks_ref


@settings(max_examples=examples(100))
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 4),
    vocab=st.sampled_from([1, 31, 32, 33, 1024, 1025, 3000]),
    data=st.data(),
)
def test_is_the_twins(seed, n, vocab, data) -> None:
    g = torch.Generator().manual_seed(seed)
    lines = torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))), dtype=torch.int64)
    x = torch.randn(n, vocab, generator=g)
    x[torch.rand(n, vocab, generator=g) < 0.02] = torch.nan
    bits = torch.randint(-(2**31), 2**31, (len(lines), -(-vocab // 32)), generator=g).to(torch.int32)
    bits[0, 0] = 0
    expected = x.clone()
    apply_masks_ref(expected, lines, bits)
    apply_masks(x, lines, bits)
    assert torch.equal(x.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
