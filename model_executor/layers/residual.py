"""Layers joined with their neighbours in the residual stream: the norm before a layer, or the sum after it.

The residual stream is a tensor `residual`, [T, hidden], and a tensor `pending`, [T, hidden], that is still to be added
to it. A layer of few rows may add its result itself. Then it leaves ScaledRows as `pending`, prepared for the next
norm. Either may be None: the first layer has no residual, and a step without sampled tokens leaves nothing pending.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..forward_batch import ForwardBatch
from ..kernels.scaled_rows import ScaledRows
from .layernorm import RMSNorm

Pending = torch.Tensor | ScaledRows


class Stream(NamedTuple):
    """The residual stream of T tokens. Whatever normalises it also adds `pending` to `residual`, in place."""

    pending: Pending | None
    residual: torch.Tensor | None


class Layer(Protocol):
    """A layer without attention: x [T, in] -> [T, out].

    `batch`: the batch of these tokens, for a layer with weights that differ between requests (an adapter); None outside
    a step.
    """

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None, /) -> torch.Tensor: ...


class AfterNorm(Protocol):
    """A norm and the layer after it."""

    def __call__(
        self, pending: Pending, residual: torch.Tensor | None, batch: ForwardBatch | None, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `pending` to the residual in place, and compute the layer of its norm: the layer's output, residual.

        Without a residual, `pending` becomes the residual.
        """


class BeforeSum(Protocol):
    """A layer whose output is added to the residual."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None, /) -> Pending:
        """Compute the layer. Returns what is to be added to the residual; ScaledRows: it has been added in place."""


class NormedLayer:
    """The AfterNorm that calls a norm and then a layer."""

    def __init__(self, norm: RMSNorm, layer: Layer) -> None:
        self._norm = norm
        self._layer = layer

    def __call__(
        self, pending: Pending, residual: torch.Tensor | None, batch: ForwardBatch | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = add_and_normalise(self._norm, pending, residual)
        return self._layer(normed, batch), residual


class LayerThenNorm:
    """A layer whose output is normalised: x [T, in] -> norm(layer(x)) [T, out]."""

    def __init__(self, layer: Layer, norm: RMSNorm) -> None:
        self._layer = layer
        self._norm = norm

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        return self._norm(self._layer(x, batch))


class SummedLayer:
    """The BeforeSum that leaves the sum to the next norm, which makes it in its own pass."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None) -> Pending:
        return self._layer(x, batch)


def add_and_normalise(
    norm: RMSNorm, pending: Pending | None, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `pending` to the residual in place and normalise the sum. Returns the norm and the residual."""
    if residual is None:
        assert isinstance(pending, torch.Tensor)
        return norm(pending), pending
    return norm(pending, residual) if isinstance(pending, torch.Tensor) else norm(residual), residual
