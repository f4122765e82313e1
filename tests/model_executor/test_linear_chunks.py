"""Chunks of a linear layer: no bit of a result depends on their size, and none on what was in memory before."""

from __future__ import annotations

import pytest
import torch

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.quantized_weight import quantize

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu
BLOCK_BYTES, LARGEST = 256 * 1024, 1024


@pytest.fixture
def chunk():
    """Sets the size of chunks, and of blocks."""
    widens = not ops.multiplies_bfloat16()
    yield lambda numbers, block_bytes=BLOCK_BYTES: ops.set_tuning(block_bytes, numbers, widens, False)
    ops.set_tuning(BLOCK_BYTES, LARGEST, widens, False)


def layers():
    from tercet.model_executor.layers import cpu_layers, quantized_layers  # needs the operations

    return {
        (x, kind): layer
        for x in (torch.float32, torch.bfloat16)
        for kind, layer in (
            (x, lambda w, x=x: cpu_layers.CpuLinear(w.to(x), to_float=True)),
            ("int8", lambda w: quantized_layers.QuantizedLinear(quantize(w, 8), to_float=True)),
            ("int4", lambda w: quantized_layers.QuantizedLinear(quantize(w, 4), to_float=True)),
        )
    } | {
        (torch.bfloat16, "compact"): lambda w: cpu_layers.CpuLinear(
            w.bfloat16(), to_float=True, compact=ops.multiplies_bfloat16()
        ),
        (torch.float32, "widened bfloat16"): lambda w: cpu_layers.CpuLinear(w.bfloat16(), to_float=True),
        (torch.float32, "widened int8"): lambda w: cpu_layers.CpuLinear(quantize(w, 8), to_float=True),
        (torch.float32, "widened int4"): lambda w: cpu_layers.CpuLinear(quantize(w, 4), to_float=True),
    }


KINDS = list(layers()) if cpu_extension.load() else []


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 40, 150])
def test_the_size_of_chunks_changes_no_bit(kind, rows, chunk):
    layer = layers()[kind](torch.randn(100, 320))
    x = torch.randn(rows, 320).to(kind[0])
    chunk(LARGEST)
    expected = layer(x)
    assert torch.equal(expected[-1:], layer(x[-1:].contiguous()))
    for numbers in (64, 128, 192, 320):
        chunk(numbers)
        layer(torch.full_like(x, 1e9))  # leaves large sums in memory
        assert torch.equal(layer(x), expected)
        layer(torch.full_like(x, 1e9))
        assert torch.equal(layer.argmax(x), ops.argmax(expected))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_may_be_larger_than_a_block(kind, chunk):
    layer = layers()[kind](torch.randn(70, 1536))
    x = torch.randn(5, 1536).to(kind[0])
    expected = layer(x)
    chunk(LARGEST, block_bytes=1024)
    assert torch.equal(layer(x), expected)
