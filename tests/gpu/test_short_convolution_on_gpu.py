"""The short convolution on a GPU: against torch, and bit by bit against itself."""

from __future__ import annotations

import pytest
import torch
from convolution_cases import LAYER, ConvolutionCase
from fused_cases import same_bits

from tercet.model_executor.layers.short_convolution import ShortConvolution
from tercet.model_executor.layers.triton_layers import TritonShortConvolution

pytestmark = pytest.mark.gpu
LENS = [1, 2, 17, 300, 44, 129, 3]
CASES = {
    "lfm2-1.2b": (torch.bfloat16, 2048, 3, False),
    "float16, bias": (torch.float16, 1536, 5, True),
    "float32": (torch.float32, 1024, 3, False),
    "odd": (torch.bfloat16, 1031, 4, True),
    "one token": (torch.bfloat16, 64, 1, False),
}


@pytest.mark.parametrize("name", CASES)
def test_any_steps_have_the_bits_of_whole_prompts(name: str) -> None:
    """Those of torch, whose sums in float32 are rounded more often. Numbers of 16 bits have exact products there."""
    dtype, channels, width, has_bias = CASES[name]
    case = ConvolutionCase(1, dtype, channels, width, LENS, has_bias=has_bias, device="cuda")
    expected, wholes, pool = (case.pool().conv_buffer for _ in range(3))
    prompts = [(k, 0, length) for k, length in enumerate(LENS)]
    by_torch = case.run(ShortConvolution(expected[LAYER], case.weights), prompts)
    outputs = case.run(TritonShortConvolution(wholes[LAYER], case.weights), prompts)
    assert all(map(same_bits, wholes, expected))
    for out, wanted in zip(outputs, by_torch, strict=True):
        is_close = (out - wanted).norm() <= 1e-5 * wanted.norm() if dtype == torch.float32 else same_bits(out, wanted)
        assert is_close
    layer = TritonShortConvolution(pool[LAYER], case.weights)
    for chunks, decode in case.random_steps(2):
        found = case.run(layer, chunks, decode=decode, num_padded=3 if decode else 0)
        for (k, start, end), out in zip(chunks, found, strict=True):
            assert same_bits(out, outputs[k][start:end])
    assert all(map(same_bits, pool, wholes))
