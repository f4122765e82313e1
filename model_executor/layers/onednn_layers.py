"""Linear layers of oneDNN (csrc/cpu/onednn.h), for matrices that have the type of the activations.

A processor with matrix units (AMX) multiplies bfloat16 with them several times as fast as with the other compiled
operations. All other layers, and the output head, are those of CpuFloatLayers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...srt.model_files.model_config import Activation
from ..forward_batch import ForwardBatch
from .cpu_layers import CpuFloatLayers
from .cpu_lora import FusedGates
from .kinds import Layer
from .packing import up_to_multiple

_ops = torch.ops.tercet_cpu

_PART_BYTES = 2 << 20
"""About the most bytes of a part of a weight. Each call of oneDNN takes about 25 us, so parts are not small."""
_PARTS = 2
"""The number of parts is a multiple of this one, so that two threads share them evenly."""
_MIN_COLUMNS, _COLUMNS = 64, 32
"""The fewest columns of a part, and what they are a multiple of, except in the last part."""
BLOCK_ROWS = tuple(1 << power for power in range(9))
"""All sizes of the blocks of rows that a call of oneDNN multiplies (`kMaxOneDnnRows` in onednn.h)."""


class OneDnnLinear:
    """`Linear` on a weight that oneDNN has packed. With an activation, `GatedLinear`.

    The weight is divided into parts of columns. A thread multiplies a part with a block of rows.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: Activation | None = None
    ) -> None:
        is_gated = activation is not None
        self.num_out = len(weight) // 2 if is_gated else len(weight)
        self._is_gated = is_gated
        self._activation: str = activation or ""
        self._columns = _columns_of_a_part(weight.shape, weight.itemsize, is_gated=is_gated)
        self.parts = [_ops.pack_for_onednn(part) for part in self._divided(weight.detach())]
        self._biases = [] if bias is None else self._divided(bias)

    def _divided(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a weight [n, k] or of a bias [n]. Those of a gated layer have rows of gate, then of up."""
        halves = x.view(2 if self._is_gated else 1, self.num_out, *x.shape[1:])
        return [part.flatten(0, 1).contiguous() for part in halves.split(self._columns, 1)]

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch | None = None, lora: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        return _ops.onednn_linear(x, self.parts, self._biases, self.num_out, self._activation, lora)


class OneDnnLayers(CpuFloatLayers):
    """CpuFloatLayers whose linear layers are oneDNN's, except the output head, whose logits are float32."""

    def linear(self, weight: Any, bias: torch.Tensor | None) -> Layer:
        return OneDnnLinear(weight, bias)

    def gated_linear(self, weight: Any, bias: torch.Tensor | None, activation: Activation) -> FusedGates:
        return OneDnnLinear(weight, bias, activation)


def _columns_of_a_part(shape: tuple[int, ...], itemsize: int, *, is_gated: bool) -> int:
    """The columns of a layer's result that a part of its weight computes; the last part may compute fewer."""
    n, k = shape
    num_parts = up_to_multiple(-(-n * k * itemsize // _PART_BYTES), _PARTS)
    columns = n // 2 if is_gated else n
    return max(up_to_multiple(-(-columns // num_parts), _COLUMNS), _MIN_COLUMNS)


class PartShape(NamedTuple):
    """What oneDNN chooses its kernel by, besides the number of rows of x."""

    rows: int
    """of the part of the weight"""
    k: int
    has_bias: bool
    dtype: torch.dtype


def part_shapes(shape: tuple[int, ...], dtype: torch.dtype, *, is_gated: bool, has_bias: bool) -> set[PartShape]:
    """The shapes of the parts of a weight [n, k]."""
    num_halves = 2 if is_gated else 1
    num_out, columns = shape[0] // num_halves, _columns_of_a_part(shape, dtype.itemsize, is_gated=is_gated)
    of_parts = {min(columns, num_out), num_out % columns} - {0}
    return {PartShape(num_halves * part, shape[1], has_bias, dtype) for part in of_parts}


@functools.cache
def keeps_bits(shape: PartShape) -> bool:
    """Whether oneDNN's products with a part have the same bits for a row alone and at each place of each block.

    These are all sizes of blocks that a step may have, so no other batch can differ.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(rows, shape.k, generator=generator).to(shape.dtype) for rows in (BLOCK_ROWS[-1], shape.rows)
    )
    biases = [torch.randn(shape.rows, generator=generator).to(shape.dtype)] if shape.has_bias else []
    packed = _ops.pack_for_onednn(weight)

    def products(rows: torch.Tensor) -> torch.Tensor:
        return _ops.onednn_linear(rows, [packed], biases, shape.rows)

    alone = torch.cat([products(row) for row in x.split(1)])
    return all(torch.equal(products(x[:rows]), alone[:rows]) for rows in BLOCK_ROWS[1:])
