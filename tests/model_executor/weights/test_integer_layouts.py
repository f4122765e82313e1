"""Integers of every layout, compared with a loop over the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor.weights.integer_layouts import LAYOUTS, Integers

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's packing: place i of a word has column AWQ_ORDER[i] of eight."""
REGION = st.tuples(st.integers(0, 19), st.integers(0, 40), st.integers(1, 20), st.integers(1, 40))


def drawn(n: int, k: int, bits: int, seed: int) -> list[list[int]]:
    return torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(seed)).tolist()


def in_words(numbers: list[int], bits: int, order: tuple[int, ...] | None) -> list[int]:
    """The words of a row of numbers, as a loop over the numbers makes them."""
    per_word, words = 32 // bits, []
    for begin in range(0, len(numbers), per_word):
        part = numbers[begin : begin + per_word]
        part += [0] * (per_word - len(part))
        word = 0
        for place in range(per_word):
            word |= part[order[place] if order else place] << bits * place
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def transposed(matrix: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def stored(layout: str, matrix: list[list[int]], bits: int, *, zeros: bool) -> torch.Tensor:
    """The tensor that a file has for values or zero points [n, columns]."""
    if layout == "int-quantized":
        return torch.tensor(matrix).sub(128).to(torch.int8)
    if layout == "pack-quantized":
        # Along k; zero points along n.
        rows = transposed(matrix) if zeros else matrix
        words = torch.tensor([in_words(row, bits, None) for row in rows], dtype=torch.int32)
        return words.t().contiguous() if zeros else words
    if layout == "awq":
        return torch.tensor([in_words(row, bits, AWQ_ORDER) for row in transposed(matrix)], dtype=torch.int32)
    # gptq: values along k, zero points along n
    if not zeros:
        return torch.tensor([in_words(row, bits, None) for row in matrix], dtype=torch.int32).t().contiguous()
    words = torch.tensor([in_words(row, bits, None) for row in transposed(matrix)], dtype=torch.int32)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    return words - ones if layout == "gptq" else words  # GPTQModel subtracts from whole words


@pytest.mark.parametrize("layout", LAYOUTS)
@given(region=REGION, seed=st.integers(0, 99), is_of_8_bits=st.booleans())
@settings(max_examples=20)
def test_a_region_has_the_numbers_that_were_packed(
    layout: str, region: tuple[int, int, int, int], seed: int, is_of_8_bits: bool
) -> None:
    bits = 8 if layout == "int-quantized" or (is_of_8_bits and layout != "awq") else 4
    n, k = 24, 48
    top, left, height, width = region
    part = (slice(top, min(top + height, n)), slice(left, min(left + width, k)))
    form, matrix = LAYOUTS[layout], drawn(n, k, bits, seed)
    values = stored(layout, matrix, bits, zeros=False)
    dims = form.packed_dims or (None, None)
    assert tuple(values.shape) == form.stored_shape((n, k), bits, dims[0])
    assert form.matrix_shape(tuple(values.shape), bits) == (n, k)
    exact = torch.tensor(matrix)[part]
    found = form.values_of(values, bits, part)
    assert found.dtype == torch.uint8 and torch.equal(found.long(), exact)
    zeros = stored(layout, matrix, bits, zeros=True)
    assert tuple(zeros.shape) == form.stored_shape((n, k), bits, dims[1])
    found = form.zeros_of(zeros, bits, part)
    assert found.dtype == torch.int16 and torch.equal(found.long(), exact)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_need_not_be_whole_words(bits: int) -> None:
    layout, matrix = LAYOUTS["pack-quantized"], drawn(5, 21, bits, seed=1)
    whole = (slice(0, 5), slice(0, 21))
    for zeros, unpack in ((False, layout.values_of), (True, layout.zeros_of)):
        words = stored("pack-quantized", matrix, bits, zeros=zeros)
        assert tuple(words.shape) == layout.stored_shape((5, 21), bits, int(not zeros))
        assert unpack(words, bits, whole).tolist() == matrix


def test_awq_has_this_order() -> None:
    """A word of the integers 0 to 7 has the digits 7 5 3 1 6 4 2 0."""
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    assert LAYOUTS["awq"].values_of(word, 4, (slice(0, 8), slice(0, 1))).t().tolist() == [list(range(8))]


@given(k=st.sampled_from([32, 96]), width=st.sampled_from([1, 32]), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_dequantized_numbers_are_exact(k: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (3, k), generator=generator).to(torch.uint8)
    zeros = torch.randint(0, 257, (3, k // width), generator=generator).to(torch.int16)
    scales = torch.randn(3, k // width, generator=generator).half()
    made = Integers(values, scales, zeros).dequantize()
    assert made.dtype == torch.float32
    for row in range(3):
        for column in range(k):
            group = column // width
            exact = (int(values[row, column]) - int(zeros[row, group])) * float(scales[row, group])
            assert float(made[row, column]) == exact
