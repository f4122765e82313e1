from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.activation import act_and_mul, act_and_mul_ref
from tercet.srt.model_files.model_config import Activation


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 4),
    width=st.integers(1, 2500),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_agrees_with_the_float64_twin(seed, num_tokens, width, dtype, activation) -> None:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(num_tokens, 2 * width, generator=g) * 3).to(dtype)
    out = act_and_mul(x, activation)
    reference = act_and_mul_ref(x.double(), activation)
    error = (out.double() - reference).norm(dim=1)
    assert bool((error <= TOLERANCE[dtype] * reference.norm(dim=1)).all())


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_large_gates_neither_overflow_nor_vanish(activation: Activation) -> None:
    x = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    assert torch.allclose(act_and_mul(x, activation), torch.tensor([[0.0, 0.0, 200.0, 2e4]]), atol=1e-4)
