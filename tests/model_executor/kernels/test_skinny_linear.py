from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import dots_by_rows, examples

from tercet.model_executor.kernels.scaled_rows import ScaledRows
from tercet.model_executor.kernels.skinny_linear import (
    MAX_ROWS,
    Norm,
    skinny_linear,
    skinny_linear_ref,
    skinny_linear_sum,
    skinny_linear_sum_ref,
)
from tercet.model_executor.layers.fused_layers import FusedHead
from tercet.model_executor.layers.layernorm import RMSNorm
from tercet.model_executor.layers.linear import Linear
from tercet.model_executor.layers.output_head import PlainHead
from tercet.model_executor.layers.residual import Stream
from tercet.model_executor.layers.triton_layers import TritonRMSNorm

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
DRAWN = {
    "seed": st.integers(0, 2**31),
    "rows": st.integers(1, MAX_ROWS),
    "num_in": st.integers(1, 300),
    "num_out": st.integers(1, 70),
    "dtype": DTYPES,
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
GATED, BIAS, NORM, SCALED = 1, 2, 4, 8


class Layer:
    """A drawn layer with its inputs. `flags`: GATED, BIAS, NORM; SCALED: the norm's input is ScaledRows."""

    def __init__(self, seed: int, rows: int, num_in: int, num_out: int, dtype: torch.dtype, flags: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        self.gated = bool(flags & GATED)
        width = 2 * num_out if self.gated else num_out
        # A view: columns of a wider tensor, as attention's output may be.
        self.x = draw(rows, num_in + 3)[:, :num_in] * 3
        self.weight = draw(width, num_in) * num_in**-0.5
        self.bias = draw(width) if flags & BIAS else None
        self.norm = Norm(draw(num_in), 1e-5) if flags & (NORM | SCALED) else None
        self.squares: torch.Tensor | None = None
        if flags & SCALED:  # of unequal parts
            parts = torch.rand(1 + seed % 5, 1, generator=g)
            self.squares = torch.zeros(len(parts), MAX_ROWS)
            self.squares[:, :rows] = self.x.float().square().sum(-1) * parts / parts.sum()

    def run(self, function, rows: slice = slice(None), dtype: torch.dtype | None = None) -> torch.Tensor:
        def cast(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t if dtype is None else t.to(dtype)

        x, norm = cast(self.x[rows]), None
        if self.norm is not None:
            norm = Norm(cast(self.norm.weight), self.norm.eps)
        if self.squares is not None:
            squares = torch.zeros_like(self.squares)
            squares[:, : len(x)] = self.squares[:, rows][:, : len(x)]
            x = ScaledRows(x, cast(squares))
        return function(x, cast(self.weight), cast(self.bias), norm=norm, gated=self.gated)


@settings(max_examples=examples(40))
@given(**DRAWN, flags=st.integers(0, 15))
def test_is_the_twin_in_float64(
    seed: int, rows: int, num_in: int, num_out: int, dtype: torch.dtype, flags: int
) -> None:
    layer = Layer(seed, rows, num_in, num_out, dtype, flags)
    expected = layer.run(skinny_linear_ref, dtype=torch.float64)
    error = (layer.run(skinny_linear).double() - expected).abs().max()
    assert error <= TOLERANCE[dtype] * (1 + expected.abs().max())


@settings(max_examples=examples(12))
@given(seed=st.integers(0, 2**31), num_in=st.sampled_from([16, 130, 256]), dtype=DTYPES, flags=st.integers(0, 15))
def test_a_row_has_the_same_bits_in_every_batch(seed: int, num_in: int, dtype: torch.dtype, flags: int) -> None:
    layer = Layer(seed, MAX_ROWS, num_in, 20, dtype, flags)
    with dots_by_rows():
        whole = layer.run(skinny_linear)
        for rows in (slice(0, 1), slice(5, 6), slice(3, 7)):
            assert torch.equal(layer.run(skinny_linear, rows), whole[rows])


class Sum:
    """A drawn layer before a sum. The residual is new at each use, because the kernel changes it."""

    def __init__(self, seed: int, rows: int, num_in: int, num_out: int, dtype: torch.dtype, *, bias: bool) -> None:
        self.layer = Layer(seed, rows, num_in, num_out, dtype, BIAS if bias else 0)
        g = torch.Generator().manual_seed(seed + 1)
        self.residual, self.next_norm = (
            torch.randn(shape, generator=g).to(dtype) for shape in ((rows, num_out), num_out)
        )

    def run(self, function, rows: slice = slice(None), dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """The sum, and what is prepared of it: the rows and the sums of their squares."""
        layer, kind = self.layer, dtype or self.residual.dtype
        x, residual = layer.x[rows].to(kind), self.residual[rows].to(kind, copy=True)
        bias = None if layer.bias is None else layer.bias.to(kind)
        scaled, squares = function(x, layer.weight.to(kind), bias, residual, self.next_norm.to(kind))
        assert not squares[:, len(x) :].any()
        return residual, scaled, squares.sum(0)[: len(x)]


@settings(max_examples=examples(30))
@given(**DRAWN, bias=st.booleans())
def test_a_sum_is_the_twin_in_float64(
    seed: int, rows: int, num_in: int, num_out: int, dtype: torch.dtype, bias: bool
) -> None:
    drawn = Sum(seed, rows, num_in, num_out, dtype, bias=bias)
    expected, found = drawn.run(skinny_linear_sum_ref, dtype=torch.float64), drawn.run(skinny_linear_sum)
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine.double() - wanted).abs().max() <= 2 * TOLERANCE[dtype] * (1 + wanted.abs().max())
    # The norm is that of the sum as it is stored.
    stored = found[0].float()
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-6  # the interpreter cuts digits off
    assert torch.allclose(found[1].float(), stored * drawn.next_norm.float(), rtol=rounding)
    assert torch.allclose(found[2], stored.square().sum(-1), rtol=1e-5)


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 2**31), num_in=st.sampled_from([16, 130, 256]), dtype=DTYPES)
def test_a_row_of_a_sum_has_the_same_bits_in_every_batch(seed: int, num_in: int, dtype: torch.dtype) -> None:
    drawn = Sum(seed, MAX_ROWS, num_in, 40, dtype, bias=True)
    with dots_by_rows():
        whole = drawn.run(skinny_linear_sum)
        for rows in (slice(0, 1), slice(5, 6), slice(3, 7)):
            assert all(
                torch.equal(some, all_[rows])
                for some, all_ in zip(drawn.run(skinny_linear_sum, rows), whole, strict=True)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_layers_compute_the_norm_between_them(dtype: torch.dtype) -> None:
    drawn = Sum(5, 3, 130, 70, dtype, bias=False)
    residual, weight = drawn.residual.clone(), torch.randn(50, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    norm = Norm(drawn.next_norm, 1e-5)
    scaled = skinny_linear_sum(drawn.layer.x, drawn.layer.weight, None, residual, norm.weight)
    assert len(scaled.squares) == 5
    wide = skinny_linear_ref(residual.double(), weight.double(), norm=Norm(norm.weight.double(), norm.eps))
    error = (skinny_linear(scaled, weight, norm=norm).double() - wide).abs().max()
    assert error <= TOLERANCE[dtype] * (1 + wide.abs().max())


def test_nothing_of_no_rows() -> None:
    assert Layer(0, 0, 20, 10, torch.float32, GATED | NORM).run(skinny_linear).shape == (0, 10)


def test_too_many_rows_and_float16_are_mistakes() -> None:
    for layer in (Layer(0, MAX_ROWS + 1, 20, 10, torch.float32, 0), Layer(0, 1, 20, 10, torch.float16, 0)):
        with pytest.raises(AssertionError):
            layer.run(skinny_linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_of_few_rows_is_rounded_once_and_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    layer = Layer(3, MAX_ROWS, 130, 70, dtype, NORM)
    assert layer.norm is not None
    head = FusedHead(TritonRMSNorm(*layer.norm), Linear(layer.weight))
    x, wide = layer.x.contiguous(), Norm(layer.norm.weight.double(), layer.norm.eps)
    of_hidden = skinny_linear_ref(x.double(), layer.weight.double())
    of_stream = skinny_linear_ref(x.double(), layer.weight.double(), norm=wide)
    for function, expected, error in (
        (head.of_hidden, of_hidden, 1e-4),
        (lambda x, out: head(Stream(None, x), out), of_stream, TOLERANCE[dtype] * 4),
        (lambda x, out: head(Stream(x, None), out), of_stream, TOLERANCE[dtype] * 4),
    ):
        with dots_by_rows():
            whole = function(x, torch.empty(MAX_ROWS, 70))
            assert torch.equal(function(x[5:6], None), whole[5:6])
        assert whole.dtype == torch.float32
        assert (whole.double() - expected).abs().max() < error


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1])
def test_the_head_adds_what_is_pending(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False)
    g = torch.Generator().manual_seed(rows)
    pending, residual, weight = (torch.randn(n, 40, generator=g) for n in (rows, rows, 70))
    norm = TritonRMSNorm(torch.randn(40, generator=g), 1e-5)
    heads = FusedHead(norm, Linear(weight)), PlainHead(RMSNorm(norm.weight, norm.eps), Linear(weight))
    mine, expected = (head(Stream(pending, residual.clone())) for head in heads)
    assert torch.allclose(mine, expected, atol=1e-4)
    mine, expected = (head(Stream(None, residual)) for head in heads)
    assert torch.allclose(mine, expected, atol=1e-4)
