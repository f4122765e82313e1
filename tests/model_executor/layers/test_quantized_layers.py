"""Products with quantized weights against the same in integers and float64, in every build that runs here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_weights import FORMS as STORED_FORMS
from quantized_weights import drawn_weight

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.activation import gated_activation
from tercet.model_executor.layers.quantized_weight import GROUP, QuantizedWeight

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FORMS = ["int8", "int4"]
ops = torch.ops.tercet_cpu


def layers():
    from tercet.model_executor.layers import quantized_layers  # needs the operations

    return quantized_layers


def assert_close(actual, expected, dtype):
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=0.1)
    assert error < TOLERANCE[dtype], error.item()


def random_weight(form, n, k, generator=None):
    """Any values that the form has; numbers of the size of 1, any sign of scales and minima."""
    low, high = {"int8": (-128, 128), "int4": (0, 16)}[form]
    values = torch.randint(low, high, (n, k), generator=generator)
    scales, minima = torch.randn(2, n, k // GROUP, generator=generator)
    if form == "int8":
        return QuantizedWeight(values.to(torch.int8), (scales / 64).half(), None)
    return QuantizedWeight(values.to(torch.uint8), (scales / 8).half(), minima.half())


def rounded(x):
    """x as products see it, float64: in groups of 32, to 127ths of the largest magnitude."""
    groups = x.float().unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(most > 1e-30, torch.tensor(127.0) / most, 0)
    return ((groups * inverse).round().double() * (most / 127).double()).flatten(1)


def product(x, weight, bias):
    """The weight's numbers are float16 times integers: float64 has room for all of them."""
    groups = weight.values.double().unflatten(1, (-1, GROUP)) * weight.scales.double()[..., None]
    if weight.minima is not None:
        groups += weight.minima.double()[..., None]
    return F.linear(rounded(x), groups.flatten(1), None if bias is None else bias.double())


@st.composite
def matrices(draw):
    """x, weight, bias"""
    dtype, form = draw(st.sampled_from(list(TOLERANCE))), draw(st.sampled_from(FORMS))
    rows, n, k = draw(st.integers(1, 40)), 2 * draw(st.integers(1, 75)), GROUP * draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, k), (n,)))
    return x, random_weight(form, n, k, generator), bias if draw(st.booleans()) else None


@settings(max_examples=80)
@given(matrices(), st.booleans())
def test_linear(drawn, to_float):
    x, weight, bias = drawn
    out = layers().QuantizedLinear(weight, bias, to_float=to_float)(x)
    assert out.dtype == (torch.float32 if to_float else x.dtype)
    assert_close(out, product(x, weight, bias), x.dtype)


@settings(max_examples=80)
@given(matrices(), st.sampled_from(["silu", "gelu_tanh"]))
def test_gated_linear(drawn, activation):
    x, weight, bias = drawn
    expected = gated_activation(product(x, weight, bias), activation)
    assert_close(layers().QuantizedGatedLinear(weight, bias, activation)(x), expected, x.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(1, 32, 32), (1, 33, 64), (5, 31, 1536), (6, 1, 96), (7, 100, 576), (64, 70, 576), (256, 40, 1536)],
)
def test_integers_are_summed_exactly(form, rows, n, k):
    x = torch.randint(-127, 128, (rows, k)).float()
    x[:, ::GROUP] = 127  # so that the scale of every group is 1
    weight = random_weight(form, n, k)
    ones = weight.with_rows(lambda part: part if part is weight.values else torch.ones_like(part))
    whole = ones.values.long() + (0 if ones.minima is None else 1)
    expected = x.long() @ whole.T
    assert expected.abs().max() < 2**24  # beyond that a float32 is not every integer
    assert torch.equal(layers().QuantizedLinear(ones)(x), expected.float())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [32, 576, 1536])
def test_every_size_of_a_piece_of_rows(form, k):
    x, weight, bias = torch.randn(256, k), random_weight(form, 70, k), torch.randn(70)
    linear, expected = layers().QuantizedLinear(weight, bias), product(x, weight, bias)
    for rows in (*range(1, 13), 64, 256):
        assert_close(linear(x[:rows]), expected[:rows], x.dtype)


def test_the_largest_integers_do_not_overflow():
    k = 1024
    for x in (-127.0, 127.0):
        for w in (-128, 127):
            weight = QuantizedWeight(torch.full((40, k), w, dtype=torch.int8), torch.ones(40, k // GROUP).half(), None)
            out = layers().QuantizedLinear(weight)(torch.full((3, k), x))
            assert torch.equal(out, torch.full((3, 40), k * x * w))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(form):
    x = torch.randn(600, 576, dtype=torch.bfloat16)
    for make in (layers().QuantizedLinear, layers().QuantizedGatedLinear):
        linear = make(random_weight(form, 100, 576))
        everything = linear(x)
        for rows in (*range(1, 34), 64, 100, 255, 256, 600):
            assert torch.equal(linear(x[-rows:].contiguous()), everything[-rows:]), rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_makes_its_own_row_invalid(form, bad):
    x = torch.randn(8, 128)
    linear = layers().QuantizedLinear(random_weight(form, 50, 128))
    expected = linear(x)
    for column in (0, 17, 127):
        spoilt = x.clone()
        spoilt[3, column] = bad
        out = linear(spoilt)
        assert out[3].isnan().all()
        out[3] = expected[3]
        assert torch.equal(out, expected)


@pytest.mark.parametrize("form", FORMS)
def test_groups_of_zeros_and_of_next_to_nothing(form):
    x = torch.zeros(3, 64)
    x[1, 40], x[2] = 1.0, 1e-40
    weight, bias = random_weight(form, 20, 64), torch.randn(20)
    out = layers().QuantizedLinear(weight, bias)(x)
    assert torch.equal(out[0], bias) and torch.allclose(out[2], bias)
    assert torch.allclose(out[1], weight.dequantize()[:, 40] + bias, atol=1e-4)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("form", STORED_FORMS)
def test_an_embedding_gives_the_vectors_of_the_dequantized_one(form, dtype):
    weight = drawn_weight(form, 77, 3, seed=0)
    ids = torch.tensor([0, 76, 31, 32, 33, 8, 7, 5, 5])
    found = layers().embedding_of(weight, dtype)(ids)
    assert torch.equal(found.nan_to_num(), weight.dequantize()[ids].to(dtype).nan_to_num())


def test_what_does_not_fit_is_refused():
    x = torch.randn(3, 64)
    packed = layers().pack(random_weight("int8", 40, 64))
    for bad_x, bad_packed, n, bits in (
        (x[:, :32].contiguous(), packed, 40, 8),
        (x[:, :40].contiguous(), packed, 40, 8),
        (x.t(), packed, 40, 8),
        (x, packed, 400, 8),
        (x, packed, 40, 4),
        (x, packed, 40, 3),
        (x, packed.view(torch.int8), 40, 8),
        (x.double(), packed, 40, 8),
    ):
        with pytest.raises(RuntimeError, match=r"must|not implemented"):
            ops.quantized_linear(bad_x, bad_packed, None, n, bits)
    with pytest.raises(RuntimeError, match="bias must"):
        ops.quantized_linear(x, packed, torch.zeros(40), 40, 8)
