"""A parameter of a model: the checkpoint tensors that it is made from, and the part of it that a rank holds."""

from __future__ import annotations

import itertools
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

import torch

Region: TypeAlias = tuple[slice, ...]
"""A part of a tensor: a slice for each dimension."""


class Split(Enum):
    """How the ranks divide a parameter."""

    REPLICATED = auto()
    """Each rank has all of it."""
    COLUMNS = auto()
    """By output features, the first dimension. The outputs of the ranks are concatenated."""
    ROWS = auto()
    """By input features, the second dimension. The outputs of the ranks are added."""
    FIRST_RANK = auto()
    """The first rank has all of it, the others have zeros: a bias of a linear layer that is split by rows."""


class Part(NamedTuple):
    """A checkpoint tensor, or neighbouring rows of one."""

    name: str
    """the tensor's Hugging Face name"""
    shape: tuple[int, ...]
    """of the part"""
    first_row: int = 0
    """of the tensor"""
    num_rows: int | None = None
    """of the tensor; None: the part is the whole tensor"""
    offset: float = 0.0
    """what is added to each number of the tensor"""
    factor: float = 1.0
    """what the sums are multiplied by"""
    head_order: tuple[int, ...] | None = None
    """the rows of each head in the order of the model, as numbers of the tensor's rows; None: as in the tensor"""
    head_rows: int | None = None
    """rows of a head in the tensor; None: as many as the part has. If it has fewer, other parts have the rest"""
    is_only_row: bool = False
    """whether the part is a vector, and the tensor a matrix that has no other row"""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        if self.is_only_row:
            return (1, *self.shape)
        num_rows = self._in_tensor(self.shape[0]) if self.num_rows is None else self.num_rows
        return (num_rows, *self.shape[1:])

    def within_tensor(self, region: Region) -> Region:
        """Where the tensor has a region of the part."""
        if self.is_only_row:
            return (slice(0, 1), *region)
        rows = slice(*(self.first_row + self._in_tensor(row) for row in (region[0].start, region[0].stop)))
        return (rows, *region[1:])

    def _in_tensor(self, rows: int) -> int:
        """The rows that the tensor has for `rows` rows of the part, which are whole heads if it lacks some."""
        if self.head_order is None or self.head_rows is None:
            return rows
        return rows // len(self.head_order) * self.head_rows

    def computed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of the model from those of the tensor; float32 unless they are equal."""
        return (numbers.float() + self.offset) * self.factor if self.is_computed else numbers

    @property
    def is_computed(self) -> bool:
        return (self.offset, self.factor) != (0, 1)

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """The part's rows from those of whole heads in the tensor, in the order of the model."""
        if self.head_order is None:
            return rows
        order = torch.tensor(self.head_order, device=rows.device)
        return rows.unflatten(0, (-1, self.head_rows or len(order))).index_select(1, order).flatten(0, 1)


def stacked(name: str, *sizes: int) -> tuple[Part, ...]:
    """The parts of a checkpoint tensor whose rows are stacked already, without their columns."""
    firsts = itertools.accumulate(sizes, initial=0)
    return tuple(Part(name, (size,), first, sum(sizes)) for size, first in zip(sizes, firsts, strict=False))


class LinearParts(NamedTuple):
    """What a linear layer of the model is made from."""

    parts: tuple[Part, ...]
    """the checkpoint tensors, without their columns and without what their names begin and end with"""
    columns: int
    has_bias: bool
    split: Split
    """how ranks divide each of the parts"""


class Parameter(NamedTuple):
    """A tensor of the model: checkpoint tensors stacked along the first dimension, so that one product serves all."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    split: Split
    """how ranks divide each of the parts"""


class Shard(NamedTuple):
    """The share of a model that one rank holds."""

    rank: int
    size: int
    """number of ranks"""

    def region(self, shape: tuple[int, ...], split: Split) -> Region:
        """The rank's part of a tensor. `check_shard` has checked that the ranks can divide it."""
        whole = [slice(0, length) for length in shape]
        if split in (Split.COLUMNS, Split.ROWS):
            dim = 0 if split is Split.COLUMNS else 1
            length, rest = divmod(shape[dim], self.size)
            assert not rest, (shape, split, self.size)
            whole[dim] = slice(self.rank * length, (self.rank + 1) * length)
        return tuple(whole)

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape of the rank's part of a parameter."""
        return tuple(part.stop - part.start for part in self.region(parameter.shape, parameter.split))


WHOLE = Shard(0, 1)
"""The shard of an engine without tensor parallelism."""


def half_split_order(head_dim: int, rotary_dim: int | None, interleaved: bool) -> tuple[int, ...]:
    """The order of a head's rows so that its components rotate with those that are head_dim / 2 later.

    A checkpoint whose first rotary_dim components are rotated has their partners rotary_dim / 2 later, or, if
    `interleaved`, beside them. Scores are sums over all components, so they do not depend on the order, if queries and
    keys have the same one.
    """
    rotated, unrotated = range(head_dim)[:rotary_dim], range(head_dim)[rotary_dim or head_dim :]
    half, middle = len(rotated) // 2, len(unrotated) // 2
    firsts, partners = (rotated[::2], rotated[1::2]) if interleaved else (rotated[:half], rotated[half:])
    return (*firsts, *unrotated[:middle], *partners, *unrotated[middle:])
