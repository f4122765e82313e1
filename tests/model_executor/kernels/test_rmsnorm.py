from __future__ import annotations

import torch
from attention_cases import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.rmsnorm import add_rmsnorm, qk_rmsnorm, rmsnorm, rmsnorm_ref

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 5),
    width=st.integers(1, 700),
    dtype=DTYPES,
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
    assert_near(out, reference)


def random(g: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def assert_near(out: torch.Tensor, reference: torch.Tensor) -> None:
    assert reference.dtype == torch.float64
    error, limit = (out.double() - reference).norm(dim=1), TOLERANCE[out.dtype] * reference.norm(dim=1)
    assert bool((error <= limit).all())


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**31), num_tokens=st.integers(0, 5), width=st.integers(1, 700), dtype=DTYPES)
def test_a_norm_is_added(seed: int, num_tokens: int, width: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    x, residual = random(g, num_tokens, width + 3, dtype=dtype)[:, :width], random(g, num_tokens, width, dtype=dtype)
    weight, before = random(g, width, dtype=dtype), residual.double()
    add_rmsnorm(x, weight, 1e-5, residual)
    assert_near(residual, before + rmsnorm_ref(x.double(), weight.double(), 1e-5))


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**31), num_tokens=st.integers(0, 5), q_size=st.integers(1, 400), k_size=st.integers(1, 400),
    dtype=DTYPES,
)  # fmt: skip
def test_queries_and_keys_are_normalised_in_place(
    seed: int, num_tokens: int, q_size: int, k_size: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    qkv = random(g, num_tokens, q_size + 2 * k_size, dtype=dtype)
    before, parts = qkv.clone(), qkv.split((q_size, k_size, k_size), 1)
    weights = random(g, q_size, dtype=dtype), random(g, k_size, dtype=dtype)
    qk_rmsnorm(qkv, *weights, 1e-5)
    for out, x, weight in zip(parts, before.split((q_size, k_size, k_size), 1), weights, strict=False):
        assert_near(out, rmsnorm_ref(x.double(), weight.double(), 1e-5))
    assert torch.equal(parts[2], before[:, q_size + k_size :])


def test_a_row_does_not_depend_on_the_others() -> None:
    x = torch.randn(7, 300)
    weight = torch.randn(300)
    everyone, summed, of_heads = rmsnorm(x, weight, 1e-6), x.clone(), x.clone()
    add_rmsnorm(x, weight, 1e-6, summed)
    qk_rmsnorm(of_heads, weight[:100], weight[:50], 1e-6)
    for i in range(7):
        row = x[i : i + 1]
        own_sum, own_heads = row.clone(), row.clone()
        add_rmsnorm(row, weight, 1e-6, own_sum)
        qk_rmsnorm(own_heads, weight[:100], weight[:50], 1e-6)
        assert torch.equal(rmsnorm(row, weight, 1e-6)[0], everyone[i])
        assert torch.equal(own_sum[0], summed[i]) and torch.equal(own_heads[0], of_heads[i])
