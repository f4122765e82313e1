"""The output head that keeps only the largest logit of each row: the tokens that `argmax` gives for its logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.quantized_weight import quantize

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu

KINDS = [
    # x, weight
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, "compact"),
    (torch.float32, torch.bfloat16),
    (torch.float32, "int8"),
    (torch.bfloat16, "int8"),
    (torch.float16, "int8"),
    (torch.bfloat16, "int4"),
    (torch.float32, "widened int8"),
    (torch.float32, "widened int4"),
]


def make_head(kind, weight, bias=None):
    """The layer of an output head with a weight of float32."""
    from tercet.model_executor.layers.cpu_layers import CpuLinear  # needs the operations
    from tercet.model_executor.layers.quantized_layers import QuantizedLinear

    if isinstance(kind, torch.dtype):
        return CpuLinear(weight.to(kind), bias, to_float=True)
    if kind == "compact":
        return CpuLinear(weight.bfloat16(), bias, to_float=True, compact=ops.multiplies_bfloat16())
    quantized = quantize(weight, 4 if kind.endswith("int4") else 8)
    return (CpuLinear if kind.startswith("widened") else QuantizedLinear)(quantized, bias, to_float=True)


def assert_tokens_of_logits(head, x, soft_cap=None):
    logits = head(x)
    if soft_cap is not None:
        ops.soft_cap(logits, soft_cap)
    expected = ops.argmax(logits)
    invalid = logits.isnan().any(1) | (logits == -math.inf).all(1)
    assert torch.equal(expected, logits.nan_to_num(nan=0.0, neginf=-3e38).argmax(1).masked_fill(invalid, -1))
    for _ in range(3):  # whichever thread has which columns
        assert torch.equal(head.argmax(x, soft_cap), expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 70),
    n=st.one_of(st.integers(1, 150), st.integers(1000, 2500)),
    groups=st.integers(1, 5),
    distinct=st.sampled_from([1, 3, 40]),
    biased=st.booleans(),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_the_tokens_are_those_of_the_logits(kind, rows, n, groups, distinct, biased, soft_cap, seed):
    """Equal columns of the weight give ties, and so does a low soft cap."""
    dtype, weight_kind = kind
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * groups, generator=generator).to(dtype)
    columns = torch.randint(0, distinct, (n,), generator=generator)
    weight = torch.randn(distinct, 32 * groups, generator=generator)[columns]
    bias = torch.randn(distinct, generator=generator)[columns] if biased else None
    assert_tokens_of_logits(make_head(weight_kind, weight, bias), x, soft_cap)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", [1, 33, 64, 1000])
@pytest.mark.parametrize("rows", [1, 2, 8, 70])
def test_rows_without_a_token(kind, n, rows):
    """A NaN anywhere, or nothing but -inf. Columns beyond n, whose weights are zeros, are no logits."""
    dtype, weight_kind = kind
    x, weight, bias = -torch.ones(rows, 32, dtype=dtype), torch.ones(n, 32), torch.zeros(n)
    x[0, 0] = math.nan
    assert_tokens_of_logits(make_head(weight_kind, weight, bias), x)
    for row in (0, rows - 1):
        for column in {0, n // 2, n - 1}:
            for value in (math.nan, -math.inf, math.inf):
                bias = torch.zeros(n)
                bias[column] = value
                x[row] = -1.0
                assert_tokens_of_logits(make_head(weight_kind, weight, bias), x)
    head = make_head(weight_kind, weight, torch.full((n,), -math.inf))
    assert head.argmax(x).tolist() == [-1] * rows
    assert_tokens_of_logits(make_head(weight_kind, weight, torch.full((n,), -1.0)), x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_first_of_equal_logits_wins_on_any_number_of_threads(kind):
    dtype, weight_kind = kind
    weight = torch.randn(3000, 64)
    weight[[700, 2999]] = weight[41] = 9.0  # of all rows of x with a positive sum
    head, x = make_head(weight_kind, weight), torch.rand(40, 64).to(dtype)
    before = ops.num_threads()
    try:
        for threads in (1, 2, 3, 7):
            ops.set_num_threads(threads)
            for _ in range(100):
                assert head.argmax(x).tolist() == [41] * 40
    finally:
        ops.set_num_threads(before)


def test_no_rows():
    assert make_head(torch.float32, torch.randn(100, 32)).argmax(torch.empty(0, 32)).tolist() == []


def test_wrong_shapes_are_refused():
    head = make_head(torch.float32, torch.randn(100, 32))
    with pytest.raises(RuntimeError, match="must"):
        ops.linear_argmax(torch.randn(3, 32), head.packed, None, 4000)
