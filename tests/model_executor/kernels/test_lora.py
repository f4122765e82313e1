"""The kernels of LoRA adapters, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fused_cases import same_bits
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lora_layers import LoraLayer, draw_layer
from triton.runtime import interpreter
from triton_interpreter import dots_by_rows, examples, permuted_programs, used_memory

from tercet.model_executor.kernels.lora import lora_delta, lora_delta_ref, lora_hidden_bytes, lora_row_counts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of the result, which the interpreter rounds, or in bfloat16 cuts off."""
DTYPES = st.sampled_from(list(TOLERANCE))
GENERATED = [Phase.generate]
"""A smaller case takes minutes to find."""
CPU = torch.device("cpu")
MANY = lora_row_counts(torch.float32, CPU)[-1]


@st.composite
def layers(draw: st.DrawFn, **options: Any) -> LoraLayer:
    """Sizes that are no multiples of a block, more adapters than programs of a tile, and each number of parts."""
    sizes = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=3)))
    rank = draw(st.one_of(st.sampled_from([8, 16, 32, 64]), st.integers(1, 40)))
    return draw_layer(
        draw(st.integers(0, 2**31)), draw(st.integers(1, MANY + 20)), draw(st.integers(1, 140)), sizes, rank,
        draw(st.integers(1, 9)), draw(DTYPES), **options,
    )  # fmt: skip


@settings(max_examples=examples(15), phases=GENERATED)
@given(layer=layers(), seed=st.integers(0, 2**31))
def test_is_the_twin_in_float64(layer: LoraLayer, seed: int) -> None:
    with permuted_programs(seed), used_memory(seed):
        assert layer.error() <= TOLERANCE[layer.x.dtype]


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """A context in which operands of products in tf32 lose the bits that tf32 has not. The interpreter keeps them."""
    builder = interpreter.InterpreterBuilder
    exact = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if "TF32" in str(precision):
            for operand in (a, b):
                operand.data = (operand.data.view("int32") & -(1 << 13)).view("float32")
        return exact(self, a, b, d, precision, *rest)

    with patch.object(builder, "create_dot", create_dot):
        yield


@settings(max_examples=examples(10), phases=GENERATED)
@given(layer=layers(out_dtype=torch.float32))
def test_hidden_numbers_are_not_rounded(layer: LoraLayer) -> None:
    """Rounded to bfloat16, they would have an error of 2e-3, to tf32 5e-4. Outputs of float32 show it."""
    with products_in_tf32():
        assert layer.error() <= 3e-6


def test_bits_that_tf32_has_not_are_lost_there() -> None:
    layer = draw_layer(1, 5, 100, (40,), 16, 3, torch.bfloat16, out_dtype=torch.float32)
    with products_in_tf32(), patch("tercet.model_executor.kernels.lora._OF_TF32", -(1 << 30)):
        assert layer.error() > 3e-6


@settings(max_examples=examples(4), phases=GENERATED)
@given(layer=layers())
def test_a_row_has_the_same_bits_in_every_batch(layer: LoraLayer) -> None:
    """Alone, among few rows and among many, in any order, and beside rows of other adapters."""
    rows = len(layer.x)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).tolist()
    with dots_by_rows():
        whole = layer.run()
        for pick in (order, order[: rows // 2], order[:1], [*order, *order][: MANY + 3]):
            assert same_bits(layer.run(pick), whole[pick])


@pytest.mark.parametrize("rows", [6, MANY + 9])
def test_what_is_no_number_stays_in_its_own_row(rows: int) -> None:
    layer = draw_layer(2, rows, 50, (40, 30), 8, 3, torch.float32)
    layer.adapters[:] = 2
    layer.adapters[4] = 0
    with dots_by_rows():
        expected = layer.run()
        layer.x[1], layer.x[3, 5], layer.out[5] = float("nan"), float("inf"), float("nan")
        found = layer.run()
    others = [row for row in range(rows) if row not in (1, 3, 5)]
    assert found[[1, 3, 5]].isnan().any(-1).all() and same_bits(found[others], expected[others])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [6, MANY + 9])
def test_rows_without_an_adapter_keep_their_bits(rows: int, dtype: torch.dtype) -> None:
    """Also where nothing is a number, in the rows of x and in the adapters."""
    layer = draw_layer(3, rows, 50, (40,), 8, 3, dtype)
    layer.adapters[::2] = 0
    layer.out[0], layer.out[2] = -0.0, float("nan")
    layer.x[0] = float("nan")
    found = layer.run()
    assert same_bits(found[::2], layer.out[::2])
    with_one = layer.adapters > 0
    assert with_one.any() and (found[with_one] != layer.out[with_one]).any(-1).all()
    layer.adapters[:] = 0
    layer.a[:], layer.b[:] = float("nan"), float("nan")
    assert same_bits(layer.run(), layer.out)


def test_an_adapter_has_its_own_part_of_the_tables() -> None:
    """What is in the other slots is not read, and an adapter of zeros adds zero."""
    layer = draw_layer(4, 20, 30, (20, 9, 5), 8, 4, torch.float32)
    layer.adapters[:] = torch.tensor([2, 4], dtype=torch.int32).repeat(10)
    layer.a[[0, 2]], layer.b[[0, 2]] = float("nan"), float("nan")
    layer.b[3] = 0
    found = layer.run()
    assert torch.equal(found[1::2], layer.out[1::2]) and layer.error() <= TOLERANCE[torch.float32]


def test_columns_beside_the_outputs_are_not_written() -> None:
    layer = draw_layer(5, 9, 30, (20, 9), 8, 2, torch.float32)
    around = torch.full((9, 40), 7.0)
    around[:, 3:32] = layer.out
    lora_delta(layer.x, around[:, 3:32], layer.a, layer.b, layer.adapters, layer.sizes)
    assert torch.equal(around[:, 3:32], layer.run())
    assert (around[:, :3] == 7).all() and (around[:, 32:] == 7).all()


def test_the_twin_adds_the_products_of_each_part() -> None:
    """By the definition, number by number."""
    layer = draw_layer(6, 9, 3, (2, 1, 3), 2, 2, torch.float64)
    expected = layer.out.clone()
    parts = [0, 0, 1, 2, 2, 2]
    for t, slot in enumerate(layer.adapters.tolist()):
        for n, part in enumerate(parts):
            for r in range(2):
                if slot:
                    expected[t, n] += layer.b[slot - 1, n, r] * (layer.a[slot - 1, 2 * part + r] @ layer.x[t])
    assert layer.adapters.unique().tolist() == [0, 1, 2]
    assert torch.allclose(layer.expected(), expected, rtol=1e-12)


def test_nothing_of_no_rows() -> None:
    layer = draw_layer(7, 0, 30, (20,), 8, 2, torch.float32)
    assert layer.run().shape == (0, 20)
    lora_delta_ref(layer.x, layer.out, layer.a, layer.b, layer.adapters)


@pytest.mark.parametrize("rows", [1, MANY - 1, MANY])
def test_the_memory_is_what_it_says(rows: int) -> None:
    layer = draw_layer(8, rows, 140, (20, 9), 8, 2, torch.float32)
    with patch.object(torch, "empty", wraps=torch.empty) as made:
        lora_delta(layer.x, layer.out, layer.a, layer.b, layer.adapters, layer.sizes)
    (call,) = made.call_args_list
    (shape,) = call.args
    assert 4 * torch.Size(shape).numel() == lora_hidden_bytes(rows, 140, 16, torch.float32, CPU)
    assert shape[0] == (1 if rows >= MANY else 5)


def test_tensors_that_do_not_fit_are_mistakes() -> None:
    layer = draw_layer(9, 3, 30, (20, 9), 8, 2, torch.float32)
    x, out, a, b, adapters, sizes = layer.x, layer.out, layer.a, layer.b, layer.adapters, layer.sizes
    for wrong in (
        (x, out, a, b, adapters, (29,)), (x, out, a, b, adapters, (20, 8)), (x, out, a[:, :8], b, adapters, sizes),
        (x, out[:2], a, b, adapters, sizes), (x, out, a, b.double(), adapters, sizes),
        (x, out, a, b, adapters.long(), sizes), (x, out, a, b, adapters[:2], sizes), (x, out, a, b, adapters, None),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            lora_delta(*wrong)
