"""Linear layers of oneDNN against float64: exact enough, with the same bits of a row in every batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers import onednn_layers
from tercet.model_executor.layers.activation import gated_activation
from tercet.model_executor.layers.linear import can_pack
from tercet.model_executor.layers.onednn_layers import BLOCK_ROWS, OneDnnLinear, PartShape, keeps_bits, part_shapes
from tercet.srt.model_files.model_config import Activation

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.empty(1, 1, dtype=dtype))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = [
    pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor"),
    pytest.mark.skipif(not DTYPES, reason="this torch has no oneDNN"),
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    keeps_bits.cache_clear()


@settings(max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 600),
    st.integers(1, 300),
    st.integers(1, 150),
    st.sampled_from([None, "silu", "gelu_tanh"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_products(
    dtype: torch.dtype,
    rows: int,
    num_out: int,
    words: int,
    activation: Activation | None,
    has_bias: bool,
    seed: int,
) -> None:
    generator, is_gated = torch.Generator().manual_seed(seed), activation is not None
    n, k = num_out * (2 if is_gated else 1), 2 * words
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, k), (n, k), (n,)))
    layer = OneDnnLinear(weight, bias if has_bias else None, activation)
    out = layer(x)
    expected = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    if activation is not None:
        expected = gated_activation(expected, activation)
    assert out.shape == expected.shape and out.dtype == dtype
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max().clamp(min=0.1)
    row = int(torch.randint(rows, (1,), generator=generator))
    if not torch.equal(layer(x[row : row + 1]), out[row : row + 1]):  # as on arm64, with few columns
        assert not all(map(keeps_bits, part_shapes(weight.shape, dtype, is_gated=is_gated, has_bias=has_bias)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "is_gated"), [(960, 576, False), (3072, 576, True)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype, n: int, k: int, is_gated: bool) -> None:
    x = torch.randn(600, k).to(dtype)
    layer = OneDnnLinear((torch.randn(n, k) / k**0.5).to(dtype), activation="silu" if is_gated else None)
    assert len(layer.parts) >= 2
    everything = layer(x)
    for rows in (*range(1, 34), 63, 64, 65, 128, 255, 256, 257, 513):
        assert torch.equal(layer(x[-rows:]), everything[-rows:]), rows
        assert torch.equal(layer(x[:rows]), everything[:rows]), rows


def test_the_bits_depend_on_no_number_of_threads() -> None:
    code = """
import torch
from tercet.model_executor import cpu_extension
cpu_extension.load()
from tercet.model_executor.layers.onednn_layers import OneDnnLinear
x, weight = torch.randn(300, 576), torch.randn(960, 576)
outs = []
for threads in (1, 3):
    torch.set_num_threads(threads)
    layer = OneDnnLinear(weight)
    outs.append(layer(x))
    cpu_extension.take_threads()
    outs.append(layer(x))
    assert torch.get_num_threads() == 1
assert all(torch.equal(out, outs[0]) for out in outs)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("shape", [(66, 96), (962, 576), (2048, 1536)])
def test_the_compared_shapes_are_those_of_the_layers_parts(
    dtype: torch.dtype, is_gated: bool, shape: tuple[int, int]
) -> None:
    layer = OneDnnLinear(torch.randn(shape).to(dtype), activation="silu" if is_gated else None)
    expected = {PartShape(part.shape[0], part.shape[1], True, dtype) for part in layer.parts}
    assert part_shapes(shape, dtype, is_gated=is_gated, has_bias=True) == expected


def test_a_difference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PartShape(64, 96, True, torch.float32)
    assert keeps_bits(shape)
    real = onednn_layers._ops.onednn_linear
    for rows in BLOCK_ROWS[1:]:

        class Ops:
            pack_for_onednn = onednn_layers._ops.pack_for_onednn

            @staticmethod
            def onednn_linear(x: torch.Tensor, *others: object, rows: int = rows) -> torch.Tensor:
                out = real(x, *others)
                if len(x) == rows:
                    out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))
                return out

        keeps_bits.cache_clear()
        monkeypatch.setattr(onednn_layers, "_ops", Ops)
        assert not keeps_bits(shape), rows


def test_an_error_of_onednn_is_raised() -> None:
    ops = torch.ops.tercet_cpu
    x, part = torch.randn(4, 8), ops.pack_for_onednn(torch.randn(6, 8))
    for arguments, message in (
        ((x, [part], [], 7), "parts have 6 rows for 7 columns"),
        ((x, [torch.randn(6, 8)], [], 6), "must be packed"),
        ((x[:, :7].contiguous(), [part], [], 6), "rows as long as those of x"),
        ((x, [part], [torch.randn(5)], 6), "bias must have shape"),
        ((x, [part], [torch.randn(6)] * 2, 6), "a bias for each part"),
        ((x, [part], [], 3, "relu"), "activation must be silu or gelu_tanh, got relu"),
        ((x, [ops.pack_for_onednn(torch.randn(rows, 8)) for rows in (3, 5)], [], 4, "silu"), "as many rows of gate as"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.onednn_linear(*arguments)
    assert ops.onednn_linear(x[:0], [part], [], 6).shape == (0, 6)
