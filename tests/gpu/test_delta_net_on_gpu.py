"""The Gated DeltaNet on a GPU: against torch, and bit by bit against itself."""

from __future__ import annotations

import pytest
import torch
from delta_net_cases import EPS, DeltaNetCase
from fused_cases import same_bits

from tercet.model_executor.layers.delta_net import DeltaNet
from tercet.model_executor.layers.triton_layers import TritonDeltaNet
from tercet.srt.model_files.delta_net_config import DeltaNetConfig

pytestmark = pytest.mark.gpu
LENS = [1, 2, 17, 300, 44, 129, 3]
CASES = {
    "qwen3.5-9b": (torch.bfloat16, DeltaNetConfig((0,), 16, 32, 128, 128, 4)),
    "float16": (torch.float16, DeltaNetConfig((0,), 2, 6, 64, 96, 2)),
    "float32": (torch.float32, DeltaNetConfig((0,), 2, 2, 128, 128, 4)),
    "odd": (torch.bfloat16, DeltaNetConfig((0,), 3, 3, 20, 33, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_any_steps_have_the_bits_of_whole_prompts(name: str) -> None:
    dtype, sizes = CASES[name]
    case = DeltaNetCase(1, dtype, sizes, LENS, device="cuda")
    expected, wholes, states = (case.states() for _ in range(3))
    prompts = [(k, 0, length) for k, length in enumerate(LENS)]
    by_torch = case.run(DeltaNet(sizes, expected, case.weights, EPS), prompts)
    outputs = case.run(TritonDeltaNet(sizes, wholes, case.weights, EPS), prompts)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for out, wanted in zip(outputs, by_torch, strict=True):
        assert (out.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()
    layer = TritonDeltaNet(sizes, states, case.weights, EPS)
    for chunks, decode in case.random_steps(2):
        found = case.run(layer, chunks, decode=decode, num_padded=3 if decode else 0)
        for (k, start, end), out in zip(chunks, found, strict=True):
            assert same_bits(out, outputs[k][start:end])
    assert all(same_bits(a[case.rows], b[case.rows]) for a, b in zip(states, wholes, strict=True))
