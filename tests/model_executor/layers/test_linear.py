"""The linear layer: right, and each row the same whatever it is multiplied beside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor.layers.linear import Linear, can_pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 90), st.booleans(), st.integers(0, 2**31))
@torch.inference_mode()
def test_against_float64(dtype: torch.dtype, rows: int, n_in: int, n_out: int, has_bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, n_in).to(dtype), torch.randn(n_out, n_in).to(dtype)
    bias = torch.randn(n_out).to(dtype) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = Linear(weight, bias)(x)
    assert out.dtype == dtype
    scale = (x.double().abs() @ weight.double().abs().T) + 1
    assert ((out.double() - expected).abs() / scale).max() < {torch.float32: 1e-6}.get(dtype, 1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    weight = torch.randn(960, 576).to(dtype)
    if not can_pack(weight):
        pytest.skip(f"{dtype} is not native here")
    linear, x = Linear(weight), torch.randn(256, 576).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 7, 16, 31, 64, 129):
        assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x[-rows:]), whole[-rows:])
