from __future__ import annotations

import pytest
import torch
from convolution_cases import LAYER, ConvolutionCase
from fused_cases import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.layers.short_convolution import ShortConvolution
from tercet.model_executor.layers.triton_layers import TritonShortConvolution


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    channels=st.sampled_from([1, 7, 64, 1030]),
    width=st.integers(1, 5),
    has_bias=st.booleans(),
    whole_numbers=st.booleans(),
    lens=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    num_padded=st.integers(0, 2),
)
def test_any_steps_have_the_bits_of_whole_prompts(
    seed, dtype, channels, width, has_bias, whole_numbers, lens, num_padded
) -> None:
    """Outputs, and what the pool gets. Prompts have those of torch, except for what the interpreter rounds otherwise:
    sums of float32, and all of bfloat16."""
    case = ConvolutionCase(seed, dtype, channels, width, lens, has_bias=has_bias, whole_numbers=whole_numbers)
    expected, wholes, pool = (case.pool().conv_buffer for _ in range(3))
    prompts = [(k, 0, length) for k, length in enumerate(lens)]
    by_torch = case.run(ShortConvolution(expected[LAYER], case.weights), prompts)
    outputs = case.run(TritonShortConvolution(wholes[LAYER], case.weights), prompts)
    if whole_numbers or dtype == torch.float16:
        assert all(map(same_bits, outputs, by_torch)) and all(map(same_bits, wholes, expected))
    layer = TritonShortConvolution(pool[LAYER], case.weights)
    for chunks, decode in case.random_steps(seed):
        found = case.run(layer, chunks, decode=decode, num_padded=num_padded if decode else 0)
        for (k, start, end), out in zip(chunks, found, strict=True):
            assert same_bits(out, outputs[k][start:end])
    assert all(map(same_bits, pool, wholes))


@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 37])
def test_each_token_finds_its_request(num_requests: int) -> None:
    """A request has the inputs of one token only if the search for it is right."""
    case = ConvolutionCase(1, torch.float16, 3, 2, [1 + k % 3 for k in range(num_requests)], has_bias=False)
    chunks = [(k, 0, length) for k, length in enumerate(case.lens)]
    layers = (kind(case.pool().conv_buffer[LAYER], case.weights) for kind in (ShortConvolution, TritonShortConvolution))
    for expected, found in zip(*(case.run(layer, chunks) for layer in layers), strict=True):
        assert torch.equal(expected, found)
