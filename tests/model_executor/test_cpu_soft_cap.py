"""The soft cap of logits of the compiled operations, and the tanh that scores of attention share with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    found = logits.clone()
    torch.ops.tercet_cpu.soft_cap(found, cap)
    return found


def test_the_error_is_a_few_bits() -> None:
    """Against float64, over all sizes of numbers. With a cap of 1 it is the error of tanh."""
    size = torch.logspace(-37, 1.3, 50_000, dtype=torch.float64)
    x = torch.cat([size, -size, torch.linspace(-10, 10, 100_000, dtype=torch.float64)]).float()[None]
    torch.testing.assert_close(capped(x, 1.0).double(), x.double().tanh(), rtol=4e-7, atol=0)
    # of two products and of 1 / cap, 6e-8 each
    torch.testing.assert_close(capped(x * 30, 30.0).double(), (x * 30).double().div(30).tanh() * 30, rtol=6e-7, atol=0)


def test_ends_are_those_of_the_function() -> None:
    x = torch.tensor([[0.0, -0.0, 400.0, -400.0, 3e38, -3e38, math.inf, -math.inf, math.nan]])
    found = capped(x, 30.0)[0]
    assert found[:8].tolist() == pytest.approx([0, 0, 30, -30, 30, -30, 30, -30], rel=1e-7)
    assert found[1].signbit() and found[8].isnan() and (found[:8].abs() <= 30).all()


@given(rows=st.integers(1, 70), n=st.integers(1, 200), cap=st.sampled_from([0.5, 30.0]), seed=st.integers(0, 2**31))
def test_a_number_has_the_same_bits_at_any_place(rows: int, n: int, cap: float, seed: int) -> None:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)) * 40
    whole = capped(x, cap)
    assert torch.equal(torch.cat([capped(row[None], cap) for row in x]), whole)
    assert torch.equal(capped(x.flip(1), cap).flip(1), whole)
    assert torch.equal(capped(x[:, n // 2 :].contiguous(), cap), whole[:, n // 2 :])


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_must_be_positive(cap: float) -> None:
    with pytest.raises(RuntimeError, match="a soft cap must be positive"):
        capped(torch.zeros(1, 8), cap)
    with pytest.raises(RuntimeError, match="logits must be Float"):
        capped(torch.zeros(1, 8, dtype=torch.float64), 1.0)
