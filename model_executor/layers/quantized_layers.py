"""Linear layers with 8-bit or 4-bit weights, on the compiled CPU operations (csrc/cpu/quantized.h)."""

from __future__ import annotations

from typing import Any

import torch

from .. import cpu_extension
from ..forward_batch import ForwardBatch
from .cpu_layers import CpuLayers, interleave, on_huge_pages, pack_bias, padded
from .kinds import Layer
from .quantized_weight import GROUP, QuantizedWeight

_ops = torch.ops.tercet_cpu
_PER_WORD = 4
"""8-bit values in a word of 32 bits"""


def pack_quantized(weight: QuantizedWeight) -> torch.Tensor:
    """Pack a weight into panels: [n, k] -> uint8 [ceil(n / width), k / GROUP, bytes of a panel's group].

    A panel is as wide as one of floats (`pack`). Rows beyond n have scales of zero. csrc/cpu/quantized.h describes the
    layout of a group.
    """
    lanes = cpu_extension.lanes()

    def panels(x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [panels, width, ...]"""
        return padded(x, 0, 2 * lanes).unflatten(0, (-1, 2 * lanes))

    header = [panels(x).transpose(1, 2).contiguous().view(torch.uint8) for x in weight[1:] if x is not None]
    values = weight.values if weight.bits == 4 else weight.values.view(torch.uint8) ^ 128
    words = panels(values).unflatten(2, (-1, GROUP // _PER_WORD, _PER_WORD)).permute(0, 2, 3, 1, 4)
    if weight.bits == 4:
        words = words[..., :lanes, :] | words[..., lanes:, :] << 4
    return on_huge_pages(torch.cat((*header, words.flatten(2)), 2))


class QuantizedLinear:
    """`Linear` on quantized weights. `to_float`: the result is float32 for every type of x."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, to_float: bool = False) -> None:
        self.num_out = weight.shape[0]
        self.packed = pack_quantized(weight)
        self.bias = pack_bias(bias)
        self._options = weight.bits, to_float

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.quantized_linear(x, self.packed, self.bias, self.num_out, *self._options)


class QuantizedGatedLinear:
    """`GatedLinear` on quantized weights. A panel holds gate rows in one half and the matching up rows in the other."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.num_out = weight.shape[0] // 2
        self.packed = pack_quantized(weight.with_rows(interleave))
        self.bias = None if bias is None else pack_bias(interleave(bias))
        self._bits = weight.bits

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.quantized_linear_silu_mul(x, self.packed, self.bias, self.num_out, self._bits)


class QuantizedEmbedding:
    """`Embedding` that reads the 8-bit output head, for models that tie the embedding to the head."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        self._packed = head.packed
        self._dtype = dtype

    def __call__(self, ids: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return _ops.quantized_embedding(ids, self._packed, self._dtype)


class QuantizedLayers(CpuLayers):
    """All layers on compiled operations, with 8-bit and 4-bit weights."""

    compiled = True

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: type of the activations."""
        self._dtype = dtype

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return QuantizedLinear(weight, bias)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return QuantizedGatedLinear(weight, bias)

    def head(self, weight: Any) -> Layer:
        return QuantizedLinear(weight, to_float=True)

    def tied_embedding(self, weight: Any, head: Layer) -> Layer:
        assert isinstance(head, QuantizedLinear)
        return QuantizedEmbedding(head, self._dtype)
