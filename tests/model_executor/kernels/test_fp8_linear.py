from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton_interpreter import dots_by_rows, examples, permuted_programs

from tercet.model_executor.kernels.fp8_linear import fp8_linear, fp8_linear_ref, quantize_rows, quantize_rows_ref
from tercet.model_executor.layers.fp8_layers import Fp8GatedLinear, Fp8Linear
from tercet.model_executor.layers.fp8_weight import Fp8Weight, quantize_fp8
from tercet.model_executor.layers.linear import GatedLinear, Linear

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
FORMS = st.sampled_from(["fp8", "fp8_block"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The interpreter cuts the last bits of bfloat16 off, and rounds the others."""


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers whose rows and groups differ in size."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-4, 3, (shape[0], 1), generator=generator))
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def weight_of(seed: int, num_out: int, num_in: int, form: str) -> Fp8Weight:
    return quantize_fp8(drawn(seed, num_out, num_in), form)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), num_in=st.integers(1, 1100), dtype=DTYPES)
def test_rows_are_rounded_as_torch_rounds_them(seed: int, rows: int, num_in: int, dtype: torch.dtype) -> None:
    x = drawn(seed, rows, num_in + 3, dtype=dtype)[:, :num_in]
    x[0, :130] = 0
    made, expected = quantize_rows(x), quantize_rows_ref(x)
    assert same(made.values, expected.values) and torch.equal(made.scales, expected.scales)
    assert made.scales[0, 0] == 1
    wide = expected.values.float() * expected.scales.repeat_interleave(128, 0)[:num_in].t()
    assert ((wide - x.float()).abs() <= torch.maximum(x.float().abs() * 2**-4, expected.scales.max() * 2**-10)).all()


def test_what_is_no_number_stays_so_in_its_own_row() -> None:
    x = drawn(0, 3, 200)
    x[1, 5], x[2, 150] = float("nan"), float("inf")
    out = fp8_linear(x, *weight_of(1, 20, 200, "fp8"))
    assert out[0].isfinite().all() and out[1:].isnan().all()


@settings(max_examples=examples(6), phases=[Phase.generate])  # a smaller case takes minutes to find
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 70),
    num_in=st.integers(1, 300),
    num_out=st.integers(1, 70),
    dtype=DTYPES,
    form=FORMS,
    has_bias=st.booleans(),
)
def test_is_the_twin_in_float64(
    seed: int, rows: int, num_in: int, num_out: int, dtype: torch.dtype, form: str, has_bias: bool
) -> None:
    x = drawn(seed, rows, num_in + 3, dtype=dtype)[:, :num_in]
    weight = weight_of(seed + 1, num_out, num_in, form)
    bias = drawn(seed + 2, num_out, 1, dtype=dtype)[:, 0] if has_bias else None
    expected = fp8_linear_ref(x.double(), *weight, bias)
    error = (fp8_linear(x, *weight, bias).double() - expected).abs()
    # A sum is as exact as its largest terms.
    size = fp8_linear_ref(x.double().abs(), weight.values.float().abs().to(torch.float8_e4m3fn), weight.scales)
    assert (error <= TOLERANCE[dtype] * expected.abs() + 1e-5 * size + 1e-6).all()


@settings(max_examples=examples(2), phases=[Phase.generate])
@given(seed=st.integers(0, 2**31), num_in=st.integers(129, 200), dtype=DTYPES, form=FORMS)
def test_a_row_has_the_same_bits_in_every_batch(seed: int, num_in: int, dtype: torch.dtype, form: str) -> None:
    """Alone, in a tile of 64 rows, and in one of 128; and in whatever order programs run."""
    x, weight = drawn(seed, 67, num_in, dtype=dtype), weight_of(seed + 1, 20, num_in, form)
    with dots_by_rows():
        whole = fp8_linear(x, *weight)
        with permuted_programs(seed):
            assert same(fp8_linear(x, *weight), whole)
        for rows in (slice(66, 67), slice(3, 67)):
            assert same(fp8_linear(x[rows], *weight), whole[rows])


@pytest.mark.parametrize("form", ["fp8", "fp8_block"])
def test_layers_are_those_of_the_widened_weight(form: str) -> None:
    """But for the rounding of activations, an error of at most 1/16 of a number. A gate makes it larger."""
    x, weight, bias = drawn(1, 7, 256), weight_of(2, 80, 256, form), drawn(3, 80, 1)[:, 0]
    wide = weight.dequantize()
    for layer, expected, allowed in (
        (Fp8Linear(weight, bias), Linear(wide, bias)(x), 0.06),
        (Fp8GatedLinear(weight, bias), GatedLinear(wide, bias)(x), 0.2),
        (Fp8GatedLinear(weight, bias, "gelu_tanh"), GatedLinear(wide, bias, "gelu_tanh")(x), 0.2),
    ):
        assert 0 < (layer(x) - expected).norm() < allowed * expected.norm()


def test_nothing_of_no_rows() -> None:
    assert fp8_linear(torch.empty(0, 20), *weight_of(0, 10, 20, "fp8")).shape == (0, 10)
    assert quantize_rows(torch.empty(0, 20)).values.shape == (0, 20)


def test_the_wide_tile_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native devices take it for layers of many outputs."""
    module = "tercet.model_executor.kernels.fp8_linear."
    x, weight = drawn(1, 70, 140, dtype=torch.bfloat16), weight_of(2, 200, 140, "fp8_block")
    with dots_by_rows():
        narrow = fp8_linear(x, *weight)
        monkeypatch.setattr(f"{module}_NARROW", 128)
        assert same(fp8_linear(x, *weight), narrow)
