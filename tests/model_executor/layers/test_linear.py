"""The linear layer: right, and each row the same whatever it is multiplied beside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import counted_launches

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.linear import Linear, can_pack, float32_logits

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_out", [False, True])
@torch.inference_mode()
def test_float32_logits_on_a_cpu(dtype: torch.dtype, has_out: bool) -> None:
    torch.manual_seed(0)
    head, hidden = Linear(torch.randn(50, 20).to(dtype)), torch.randn(3, 20).to(dtype)
    out = torch.empty(3, 50) if has_out else None
    logits = float32_logits(head, hidden, out)
    assert logits.dtype == torch.float32 and torch.equal(logits, head(hidden).float())
    assert out is None or logits is out


@pytest.mark.parametrize("has_out", [False, True])
def test_float32_logits_are_one_launch_on_a_gpu(has_out: bool) -> None:
    meta = torch.device("meta")
    head = Linear(torch.empty(50, 20, dtype=torch.bfloat16, device=meta))
    hidden = torch.empty(3, 20, dtype=torch.bfloat16, device=meta)
    out = torch.empty(3, 50, device=meta) if has_out else None
    with counted_launches() as counted:
        logits = float32_logits(head, hidden, out)
    assert counted.names == ["mm"] and logits.shape == (3, 50) and logits.dtype == torch.float32
    assert out is None or logits is out


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
def test_the_error_of_a_compiled_float32_linear_hardly_grows_with_its_inputs() -> None:
    """One long sum of 8192 products would have an error of 1.7e-6."""
    from tercet.model_executor.layers.cpu_layers import CpuLinear  # needs the operations

    for k in (64, 576, 1536, 8192):
        x, weight = torch.randn(7, k), torch.randn(40, k)
        expected = x.double() @ weight.double().T
        error = (CpuLinear(weight)(x).double() - expected).norm() / expected.norm()
        assert error < 4e-7, (k, error.item())
