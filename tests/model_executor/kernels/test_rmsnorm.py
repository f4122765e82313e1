from __future__ import annotations

import torch
from attention_cases import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.rmsnorm import rmsnorm, rmsnorm_ref


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 5),
    width=st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    fused=st.booleans(),
    magnitude=st.sampled_from([1e-2, 1.0, 30.0]),
)
def test_agrees_with_the_float64_twin(seed, num_tokens, width, dtype, fused, magnitude) -> None:
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((num_tokens, width + 3), torch.nan).to(dtype)
    wide[:, :width] = torch.randn(num_tokens, width, generator=g) * magnitude
    x, weight = wide[:, :width], torch.randn(width, generator=g).to(dtype)
    residual = torch.randn(num_tokens, width, generator=g).to(dtype) if fused else None
    before = None if residual is None else residual.clone()
    out = rmsnorm(x, weight, 1e-5, residual)
    if before is None or residual is None:
        added = x
    else:
        added = residual
        # One rounding; the interpreter cuts bf16 off instead of rounding it.
        error = (residual.double() - (x.double() + before.double())).norm()
        assert error <= TOLERANCE[dtype] * (x.double() + before.double()).norm()
    reference = rmsnorm_ref(added.double(), weight.double(), 1e-5)
    error, limit = (out.double() - reference).norm(dim=1), TOLERANCE[dtype] * reference.norm(dim=1)
    assert bool((error <= limit).all())


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(7, 300)
    weight = torch.randn(300)
    everyone = rmsnorm(x, weight, 1e-6)
    assert all(torch.equal(rmsnorm(x[i : i + 1], weight, 1e-6)[0], everyone[i]) for i in range(7))
