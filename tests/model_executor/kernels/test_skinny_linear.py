from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import dots_by_rows, examples

from tercet.model_executor.kernels.skinny_linear import MAX_ROWS, Norm, skinny_linear, skinny_linear_ref
from tercet.model_executor.layers.fused_layers import FusedHead

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


class Layer:
    """A drawn layer with its inputs. `residual` is new at each use, because the kernel changes it."""

    def __init__(self, seed: int, rows: int, num_in: int, num_out: int, dtype: torch.dtype, flags: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        self.gated = bool(flags & 1)
        width = 2 * num_out if self.gated else num_out
        # A view: columns of a wider tensor, as attention's output may be.
        self.x = draw(rows, num_in + 3)[:, :num_in] * 3
        self.weight = draw(width, num_in) * num_in**-0.5
        self.bias = draw(width) if flags & 2 else None
        self.norm = Norm(draw(num_in), 1e-5) if flags & 4 else None
        self.residual = draw(rows, num_out) if flags & 8 else None

    def run(self, function, rows: slice = slice(None), dtype: torch.dtype | None = None) -> torch.Tensor:
        def cast(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t if dtype is None else t.to(dtype)

        residual = None if self.residual is None else cast(self.residual[rows].clone())
        norm = None if self.norm is None else Norm(cast(self.norm.weight), self.norm.eps)
        out = function(
            cast(self.x[rows]), cast(self.weight), cast(self.bias), norm=norm, gated=self.gated, residual=residual
        )
        assert residual is None or out is residual
        return out


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, MAX_ROWS),
    num_in=st.integers(1, 300),
    num_out=st.integers(1, 70),
    dtype=DTYPES,
    flags=st.integers(0, 15),
)
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


def test_nothing_of_no_rows() -> None:
    assert Layer(0, 0, 20, 10, torch.float32, 5).run(skinny_linear).shape == (0, 10)


def test_too_many_rows_and_float16_are_mistakes() -> None:
    for layer in (Layer(0, MAX_ROWS + 1, 20, 10, torch.float32, 0), Layer(0, 1, 20, 10, torch.float16, 0)):
        with pytest.raises(AssertionError):
            layer.run(skinny_linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_of_few_rows_is_rounded_once_and_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    layer = Layer(3, MAX_ROWS, 130, 70, dtype, 0)
    head = FusedHead.__new__(FusedHead)  # a CPU would pack the weight
    head.weight, head.bias, head.is_packed = layer.weight, None, False
    x = layer.x.contiguous()
    with dots_by_rows():
        whole = head.float32(x, torch.empty(MAX_ROWS, 70))
        assert torch.equal(head.float32(x[5:6], None), whole[5:6])
    expected = skinny_linear_ref(x.double(), layer.weight.double())
    assert whole.dtype == torch.float32
    assert (whole.double() - expected).abs().max() < 1e-4
