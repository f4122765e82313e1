"""Packs weights into panels for the compiled CPU operations. csrc/cpu/README.md has pictures of the layouts."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, overload

import torch
import torch.nn.functional as F

from ...srt.machine.huge_pages import Arena
from .. import cpu_extension
from .quantized_weight import GROUP, QuantizedWeight

_PER_WORD = 4
"""8-bit values in a word of 32 bits"""
COMPACT_BITS = 12
"""Bits of a number of a compact weight, without headers and exceptions"""


class PackedWeight(NamedTuple):
    """A weight whose panels exist already. Layers use them as they are, and never write to them."""

    panels: torch.Tensor
    """`panels_of` or `gated_panels_of` the weight, compact or not"""
    shape: torch.Size
    """[n, k] of the weight"""
    bits: int | None
    """of a QuantizedWeight; None: the weight is a tensor"""


Weight: TypeAlias = "torch.Tensor | QuantizedWeight | PackedWeight"


def pack(weight: Weight, *, compact: bool = False) -> torch.Tensor:
    """The panels of a weight on huge pages. `compact`: see `panels_of`."""
    return weight.panels if isinstance(weight, PackedWeight) else on_huge_pages(panels_of(weight, compact=compact))


def pack_gated(weight: Weight, *, compact: bool = False) -> torch.Tensor:
    """The panels of a gate and up projection on huge pages. `compact`: see `panels_of`."""
    return (
        weight.panels if isinstance(weight, PackedWeight) else on_huge_pages(gated_panels_of(weight, compact=compact))
    )


def panels_of(weight: torch.Tensor | QuantizedWeight, *, compact: bool = False) -> torch.Tensor:
    """The panels of a weight [n, k]: [ceil(n / width), k / per_word, width, per_word] of a tensor. Pads n with zeros.

    A panel holds `width` rows of the weight, as many as there are floats in two vector registers. A row consists of
    words of 32 bits. The panel stores first word 0 of all its rows, then word 1 of all its rows, and so on, because one
    step of the dot products reads the same word of all rows. The result need not be contiguous.

    `compact`: a weight of bfloat16 takes 12 bits a number, without loss: uint8 [ceil(n / width), bytes]. It stays as it
    is if too many of its numbers have rare exponents. Only builds that multiply bfloat16 multiply compact weights.
    csrc/cpu/compact.h describes them.
    """
    if isinstance(weight, QuantizedWeight):
        return _quantized_panels(weight)
    width, per_word = 2 * cpu_extension.lanes(), 4 // weight.itemsize
    n, k = weight.shape
    assert k % per_word == 0, (n, k)
    panels = padded(weight, 0, width).view(-1, width, k // per_word, per_word).transpose(1, 2)
    if not compact or weight.dtype != torch.bfloat16:
        return panels
    panels = panels.contiguous()
    compacted = torch.ops.tercet_cpu.compact(panels)
    return panels if compacted is None else compacted


def gated_panels_of(weight: torch.Tensor | QuantizedWeight, *, compact: bool = False) -> torch.Tensor:
    """The panels of a gate and up projection: one half of a panel has gate rows, the other the matching up rows."""
    if isinstance(weight, QuantizedWeight):
        return panels_of(weight.with_rows(interleave))
    return panels_of(interleave(weight), compact=compact)


_arena = Arena()


def on_huge_pages(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of x on huge pages."""
    return torch.from_numpy(_arena.take(x.nbytes)).view(x.dtype).view(x.shape).copy_(x)


def up_to_multiple(x: int, divisor: int) -> int:
    return -(-x // divisor) * divisor


def padded(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Pad dimension `dim` with zeros to a multiple of `multiple`. Returns x itself if no padding is needed."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


@overload
def pack_bias(bias: torch.Tensor) -> torch.Tensor: ...


@overload
def pack_bias(bias: None) -> None: ...


def pack_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Pack a bias [n] as `pack` packs rows: float32 [ceil(n / width), width]."""
    if bias is None:
        return None
    width = 2 * cpu_extension.lanes()
    return padded(bias.float(), 0, width).view(-1, width)


def _quantized_panels(weight: QuantizedWeight) -> torch.Tensor:
    """The panels of a weight [n, k]: uint8 [ceil(n / width), k / GROUP, bytes of a panel's group].

    A panel is as wide as one of floats. Rows beyond n have scales of zero. csrc/cpu/README.md describes the layout.
    """
    groups = weight.shape[1] // GROUP

    def by_column(x: torch.Tensor, count: int) -> torch.Tensor:
        """[n, count * numbers] -> uint8 [panels, count, bytes]: number 0 of all rows of a panel, then number 1"""
        numbers = _rows_of_panels(x).unflatten(2, (count, -1)).permute(0, 2, 3, 1).contiguous()
        return numbers.view(torch.uint8).flatten(2)

    header = [by_column(x, groups) for x in (weight.scales, weight.minima) if x is not None]
    panels = torch.cat((*header, _words(weight)), 2)
    if weight.factors is None:
        return panels
    factors = by_column(weight.factors.flatten(1), weight.factors.shape[1])
    return torch.cat((factors.flatten(1), panels.flatten(1)), 1).unflatten(1, (groups, -1))


def _rows_of_panels(x: torch.Tensor) -> torch.Tensor:
    """[n, ...] -> [panels, width, ...]"""
    width = 2 * cpu_extension.lanes()
    return padded(x, 0, width).unflatten(0, (-1, width))


def _words(weight: QuantizedWeight) -> torch.Tensor:
    """The words of the groups of a weight [n, k]: uint8 [panels, k / GROUP, bytes]."""
    lanes = cpu_extension.lanes()

    def in_words(values: torch.Tensor) -> torch.Tensor:
        """uint8 [n, k] -> [panels, groups, words, width, _PER_WORD]"""
        words = _rows_of_panels(values).unflatten(2, (-1, GROUP // _PER_WORD, _PER_WORD))
        return words.permute(0, 2, 3, 1, 4)

    if weight.bits == 8:
        return in_words(_bytes(weight.values)).flatten(2)
    words = in_words(weight.values if weight.bits == 4 else weight.values.view(torch.uint8) + 32)
    left, right = words[..., :lanes, :], words[..., lanes:, :]
    if weight.bits == 4:
        return (left | right << 4).flatten(2)
    low = (left & 15 | right << 4).unflatten(2, (-1, 2))
    high = (left >> 4 | right >> 4 << 2).unflatten(2, (-1, 2))
    return torch.cat((low, high[..., :1, :, :] | high[..., 1:, :, :] << 4), 3).flatten(2)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Weights of 8 bits [n, k] as the operations read them: w + 128, in some builds w at odd places."""
    stored = values.view(torch.uint8) ^ 128
    if torch.ops.tercet_cpu.odd_bytes_are_signed():
        stored[..., 1::2] ^= 128
    return stored


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of gate_up [2 * n, ...]: `lanes` gate rows, the matching up rows, the next gate rows, ..."""
    lanes = cpu_extension.lanes()
    halves = padded(gate_up.view(2, -1, *gate_up.shape[1:]), 1, lanes).view(2, -1, lanes, *gate_up.shape[1:])
    return halves.transpose(0, 1).reshape(-1, *gate_up.shape[1:])
