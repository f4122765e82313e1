"""The kernels of LoRA adapters on a real GPU: against float64, row by row, and recorded in a graph."""

from __future__ import annotations

import pytest
import torch
from fused_cases import same_bits
from lora_layers import draw_layer

pytestmark = pytest.mark.gpu

LAYERS = [(2048, (2048, 512, 512), 16), (576, (576, 192, 192), 8), (8192, (2048,), 128), (1000, (700, 300), 20)]
"""Inputs, outputs and rank."""


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("num_in", "sizes", "rank"), LAYERS)
def test_a_layer_is_the_twin_and_no_row_depends_on_the_batch(
    num_in: int, sizes: tuple[int, ...], rank: int, dtype: torch.dtype, allowed: float
) -> None:
    """More than 1,024 rows have other kernels."""
    layer = draw_layer(2, 1100, num_in, sizes, rank, 20, dtype, device="cuda")
    whole = layer.run()
    assert layer.error() <= allowed
    assert same_bits(whole[layer.adapters == 0], layer.out[layer.adapters == 0])
    for rows in (slice(0, 1), slice(5, 12), slice(100, 300), slice(0, 1024)):
        assert same_bits(layer.run(rows), whole[rows])
    order = torch.randperm(1100, generator=torch.Generator().manual_seed(1)).tolist()
    assert same_bits(layer.run(order), whole[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_numbers_are_not_rounded(dtype: torch.dtype) -> None:
    layer = draw_layer(3, 50, 2048, (512,), 16, 4, dtype, out_dtype=torch.float32, device="cuda")
    assert layer.error() <= 3e-5


def test_a_graph_reads_the_adapters_of_each_replay() -> None:
    layer = draw_layer(4, 8, 576, (576, 192, 192), 16, 4, torch.bfloat16, device="cuda")
    layer.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.run()
    for adapters in ([0] * 8, [1, 2, 3, 4, 4, 0, 1, 2], [3] * 8):
        layer.adapters.copy_(torch.tensor(adapters, dtype=torch.int32))
        graph.replay()
        assert same_bits(found, layer.run())
