"""The exponential function of the compiled operations, as SiLU and attention use it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

SIZE = 32  # more than a panel


def silu(gates: torch.Tensor) -> torch.Tensor:
    """silu(gate) of [rows, SIZE] by a gated layer that multiplies with 1: gate = x, up = 1."""
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear  # needs the operations

    weight = torch.cat((torch.eye(SIZE), torch.zeros(SIZE, SIZE)))
    bias = torch.cat((torch.zeros(SIZE), torch.ones(SIZE)))
    return CpuGatedLinear(weight, bias)(gates)


@given(st.lists(st.floats(-86, 86, width=32), min_size=SIZE, max_size=SIZE))
def test_is_exact_to_a_few_bits(numbers):
    gates = torch.tensor([numbers])
    # of the exponential function 8e-8, and of a sum, a division and two products 6e-8 each
    torch.testing.assert_close(silu(gates).double(), F.silu(gates.double()), rtol=4e-7, atol=1e-37)


def test_ends_are_those_of_the_function():
    ends = torch.full((2, SIZE), -87.0)
    ends[0, :8] = torch.tensor([0.0, -0.0, 87.5, 88.5, 1e30, -88.5, -200.0, -3e38])
    values = silu(ends)
    assert values[0, 5:8].tolist() == [0, 0, 0]  # its exponential function is infinite
    torch.testing.assert_close(values.double(), F.silu(ends.double()), rtol=4e-7, atol=1e-36)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, -0x3FFFFF, -1])
def test_nan_stays_nan(bits):
    """The weight of one key is NaN, so the result of attention is. Some have bits where an exponent is made."""
    keys = torch.randn(40, 1, 8)
    keys[17, 0, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    slots, row, length = torch.arange(40, dtype=torch.int32)[None], torch.tensor([0]), torch.tensor([40])
    attention = torch.ops.tercet_cpu.attention
    assert attention(torch.ones(1, 1, 8), keys, torch.ones(40, 1, 8), slots, row, length, None, None, 1.0).isnan().all()
