"""LoRA adapters on the compiled CPU operations (csrc/cpu/lora.h): their tables, and gate and up projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ...srt.machine.huge_pages import Arena
from .. import cpu_extension
from ..forward_batch import ForwardBatch, TokenAdapters
from .lora_layers import LoraShape, LoraSize, LoraTables, LoraWeight, rounded
from .packing import panels_of, up_to_multiple

_ops = torch.ops.tercet_cpu


class CpuLoraTables:
    """The LoraTables in panels, as `panels_of` makes them.

    A: [slots, panels, in / per_word, width, per_word], of the rows of all stacked matrices one after the other.
    B: [slots, panels, rank / per_word, width, per_word]. Each stacked matrix begins a panel.

    An adapter of a lower rank uses only the first panels of A, and the first words of each panel of B. The halves of a
    gate and up projection are stacked matrices, because a fused layer reads them side by side. If the checkpoint stacks
    them already, they have the same A twice.
    """

    def __init__(self, shape: LoraShape, size: LoraSize, dtype: torch.dtype, arena: Arena) -> None:
        """`dtype`: type of the activations."""
        self._rows, self._columns, is_gated = shape
        if is_gated:
            self._rows = (sum(self._rows) // 2,) * 2
        # Words of bfloat16 have two numbers. Activations of another type are multiplied as floats.
        self._dtype = torch.bfloat16 if dtype == torch.bfloat16 and self._columns % 2 == 0 else torch.float32
        self._per_word = per_word = 4 // self._dtype.itemsize
        width = 2 * cpu_extension.lanes()
        num_slots, rank = size.num_slots, up_to_multiple(size.max_rank, per_word)

        def table(panels: int, numbers: int) -> torch.Tensor:
            shape = num_slots, panels, numbers // per_word, width, per_word
            memory = torch.from_numpy(arena.take(math.prod(shape) * self._dtype.itemsize))
            return memory.view(self._dtype).view(shape)

        self._panels = [-(-rows // width) for rows in self._rows]
        self._a = table(-(-len(self._rows) * rank // width), self._columns)
        self._b = table(sum(self._panels), rank)
        self._ranks = torch.zeros(num_slots + 1, dtype=torch.int64)
        """The rank of each slot; 0: it is empty. Slot 0 stands for no adapter."""
        self.num_bytes = self._a.nbytes + self._b.nbytes

    def write(self, slot: int, weight: LoraWeight | None) -> None:
        self._ranks[slot] = 0
        if weight is None:
            return
        rank = weight.b.shape[1]
        missing = -rank % self._per_word
        a = torch.nn.functional.pad(rounded(weight.a, self._dtype), (0, 0, 0, missing))
        b = torch.nn.functional.pad(rounded(weight.b, self._dtype), (0, missing))
        panels = panels_of(a.expand(len(self._rows), -1, -1).flatten(0, 1))
        self._a[slot - 1, : len(panels)] = panels
        of_rows = self._b[slot - 1, :, : b.shape[1] // self._per_word]
        for to, part in zip(of_rows.split(self._panels), b.split(self._rows), strict=True):
            to.copy_(panels_of(part))
        self._ranks[slot] = rank + missing

    def add(self, x: torch.Tensor, out: torch.Tensor, adapters: TokenAdapters) -> None:
        _ops.expand_lora(self._shrunk(x, adapters), out, self._b, self._ranks, adapters.slots, self._rows)

    def of_gates(self, x: torch.Tensor, adapters: TokenAdapters) -> Sequence[torch.Tensor]:
        """What the operation of a gate and up projection takes as `lora`. It adds B A x before the activation."""
        return self._shrunk(x, adapters), self._b, self._ranks, adapters.slots

    def _shrunk(self, x: torch.Tensor, adapters: TokenAdapters) -> torch.Tensor:
        """A x, float32."""
        return _ops.shrink_lora(x, self._a, self._ranks, adapters.slots, len(self._rows))


class FusedGates(Protocol):
    """A compiled gate and up projection with its activation."""

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch | None = None, lora: Sequence[torch.Tensor] | None = None, /
    ) -> torch.Tensor:
        """`lora`: see `CpuLoraTables.of_gates`."""


class CpuLoraGatedLinear:
    """A fused gate and up projection with adapters."""

    def __init__(self, layer: FusedGates, tables: LoraTables) -> None:
        assert isinstance(tables, CpuLoraTables)
        self._layer = layer
        self._tables = tables

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        if batch is None or batch.adapters is None:
            return self._layer(x, batch)
        return self._layer(x, batch, self._tables.of_gates(x, batch.adapters))
