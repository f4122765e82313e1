"""Linear layers with LoRA adapters, around layers of any kind: y = W x + B A x, with the A and B of a token's adapter.

All adapters are in tables on the device. A layer adds what the adapters of its batch compute; other tokens keep their
bits. In a gate and up projection, the sum comes before the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ..forward_batch import ForwardBatch, TokenAdapters
from .residual import Layer


class LoraSize(NamedTuple):
    """The size of the tables of adapters."""

    num_slots: int
    max_rank: int


class LoraShape(NamedTuple):
    """The shape of a linear layer that adapters change."""

    rows: tuple[int, ...]
    """of each matrix that is stacked in it; each has an A of its own"""
    columns: int
    gated: bool = False
    """whether it is a gate and up projection: the first half of its rows is that of gate, the second that of up"""


class LoraWeight(NamedTuple):
    """The matrices of an adapter for one layer, float32."""

    a: torch.Tensor
    """[stacked matrices, rank, in]"""
    b: torch.Tensor
    """[out, rank], times the scale of the adapter. Rows of a stacked matrix multiply the output of its A"""


class LoraTables(Protocol):
    """The matrices of all adapters for one layer, on the device, in the type of the activations."""

    num_bytes: int

    def write(self, slot: int, weight: LoraWeight | None) -> None:
        """Write an adapter to a slot, 1 or higher. None: the adapter does not change this layer, or the slot is empty.

        Raises ValueError if a number is too large for the type. Then the slot is in an undefined state.
        """

    def add(self, x: torch.Tensor, out: torch.Tensor, adapters: TokenAdapters) -> None:
        """Add B A x to `out` in place: x [T, in], out [T, out]. Both products have sums of float32."""


class TorchLoraTables:
    """The LoraTables of plain torch: A [slots, stacked matrices * rank, in], B [slots, out, rank]."""

    def __init__(self, shape: LoraShape, size: LoraSize, dtype: torch.dtype, device: torch.device) -> None:
        num_slots, rank = size
        self._shape, self._rank = shape, rank
        self.a = torch.zeros(num_slots, len(shape.rows) * rank, shape.columns, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, sum(shape.rows), rank, dtype=dtype, device=device)
        self.num_bytes = self.a.nbytes + self.b.nbytes

    def write(self, slot: int, weight: LoraWeight | None) -> None:
        a, b = self.a[slot - 1], self.b[slot - 1]
        a.zero_()
        b.zero_()
        if weight is not None:
            rank = weight.b.shape[1]
            a.unflatten(0, (-1, self._rank))[:, :rank] = rounded(weight.a, a.dtype).to(a.device)
            b[:, :rank] = rounded(weight.b, b.dtype).to(b.device)

    def add(self, x: torch.Tensor, out: torch.Tensor, adapters: TokenAdapters) -> None:
        wide = torch.promote_types(self.a.dtype, torch.float32)
        for slot, tokens in adapters.groups:
            a, b = self.a[slot - 1].to(wide), self.b[slot - 1].to(wide)
            between = (x.index_select(0, tokens).to(wide) @ a.t()).split(self._rank, 1)
            parts = zip(between, b.split(self._shape.rows), strict=True)
            added = torch.cat([h @ rows.t() for h, rows in parts], 1)
            out.index_copy_(0, tokens, (out.index_select(0, tokens) + added).to(out.dtype))


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of an adapter in the type of a table. Raises ValueError if a number is too large for it."""
    found = matrix.to(dtype)
    if not found.isfinite().all():
        raise ValueError(f"the adapter has numbers that are too large for {str(dtype).removeprefix('torch.')}")
    return found


class LoraLinear:
    """A linear layer with adapters."""

    def __init__(self, layer: Layer, tables: LoraTables) -> None:
        self._layer = layer
        self._tables = tables

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        out = self._layer(x, batch)
        if batch is not None and batch.adapters is not None:
            self._tables.add(x, out, batch.adapters)
        return out


class LoraGatedLinear:
    """A gate and up projection with adapters, and its activation, in two steps."""

    def __init__(self, projection: Layer, activate: Callable[[torch.Tensor], torch.Tensor], tables: LoraTables) -> None:
        """`projection`: gives [T, 2 * out], the columns of gate first. `activate`: makes activation(gate) * up [T, out]
        of it, and may overwrite it."""
        self._projection = LoraLinear(projection, tables)
        self._activate = activate

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self._activate(self._projection(x, batch))
