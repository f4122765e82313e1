"""Layers joined with their neighbours in the residual stream: the norm before a layer, or the sum after it.

The residual stream is a tensor `residual`, [T, hidden], and a tensor `pending`, [T, hidden], that is still to be added
to it. Some layers add their result themselves, and leave None as `pending`. A layer of few rows may leave ScaledRows,
which are prepared for the next norm. The first layer has no residual.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..forward_batch import ForwardBatch
from ..kernels.scaled_rows import ScaledRows
from .layernorm import RMSNorm

Pending = torch.Tensor | ScaledRows | None


class Stream(NamedTuple):
    """The residual stream of T tokens. Whatever normalises it also adds `pending` to `residual`, in place."""

    pending: Pending
    residual: torch.Tensor | None


class Layer(Protocol):
    """A layer without attention: x [T, in] -> [T, out].

    `batch`: the batch of these tokens, for a layer with weights that differ between requests (an adapter); None outside
    a step.
    """

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None, /) -> torch.Tensor: ...


class StreamLayer(Protocol):
    """A layer of the residual stream, after a norm of the stream if it has one."""

    def __call__(
        self, pending: Pending, residual: torch.Tensor | None, batch: ForwardBatch | None, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `pending` to the residual in place, and compute the layer: its output, residual.

        Without a residual, `pending` becomes the residual.
        """


class BeforeSum(Protocol):
    """A layer whose output is added to the residual."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None, /) -> Pending:
        """Compute the layer. Returns what is still to be added to the residual, or has added it in place."""


class NormedLayer:
    """The StreamLayer that calls a norm and then a layer."""

    def __init__(self, norm: RMSNorm, layer: Layer) -> None:
        self._norm = norm
        self._layer = layer

    def __call__(
        self, pending: Pending, residual: torch.Tensor | None, batch: ForwardBatch | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = add_and_normalise(self._norm, pending, residual)
        return self._layer(normed, batch), residual


class UnnormedLayer:
    """The StreamLayer without a norm, which follows a NormedSum or the embedding."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(
        self, pending: Pending, residual: torch.Tensor | None, batch: ForwardBatch | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = pending if residual is None else residual
        assert isinstance(stream, torch.Tensor) and (pending is None or residual is None)
        return self._layer(stream, batch), stream


class NormedSum:
    """The BeforeSum that adds the norm of the layer's output: residual += norm(layer(x))."""

    def __init__(self, layer: Layer, norm: RMSNorm) -> None:
        self._layer = layer
        self._norm = norm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None) -> Pending:
        self._norm.add_to(residual, self._layer(x, batch))
        return None


class SummedLayer:
    """The BeforeSum that leaves the sum to the next norm, which makes it in its own pass."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch | None) -> Pending:
        return self._layer(x, batch)


def add_and_normalise(
    norm: RMSNorm, pending: Pending, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `pending` to the residual in place and normalise the sum. Returns the norm and the residual."""
    if residual is None:
        assert isinstance(pending, torch.Tensor)
        return norm(pending), pending
    return norm(pending, residual) if isinstance(pending, torch.Tensor) else norm(residual), residual
