"""The output head with the last norm before it: from the residual stream to logits, or to the most probable tokens."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from .layernorm import RMSNorm
from .linear import float32_logits
from .residual import Layer, Stream, add_and_normalise


class OutputHead(Protocol):
    """The last norm and the output head."""

    def normalise(self, stream: Stream) -> torch.Tensor:
        """Compute the hidden states of tokens, [n, hidden]."""

    def of_hidden(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits from hidden states [n, hidden]: float32 [n, vocab], written to `out` if given."""

    def __call__(self, stream: Stream, out: torch.Tensor | None = None, /) -> torch.Tensor:
        """Compute logits from the stream, as `of_hidden` of `normalise`."""


class PlainHead:
    """The OutputHead that calls a norm and then a layer."""

    def __init__(self, norm: RMSNorm, layer: Layer) -> None:
        self._norm = norm
        self._layer = layer

    def normalise(self, stream: Stream) -> torch.Tensor:
        return add_and_normalise(self._norm, *stream)[0]

    def of_hidden(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return float32_logits(self._layer, hidden, out)

    def __call__(self, stream: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.of_hidden(self.normalise(stream), out)


@runtime_checkable
class GreedyLayer(Layer, Protocol):
    """The layer of an output head that can keep only the largest logit of each row."""

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """The first most probable token of each row, int64 [n]; INVALID_TOKEN if its logits are invalid."""


class GreedyHead(PlainHead):
    """A PlainHead that computes the most probable tokens without writing logits."""

    def __init__(self, norm: RMSNorm, layer: GreedyLayer) -> None:
        super().__init__(norm, layer)
        self.greedy = layer.argmax
        """the tokens of hidden states [n, hidden]"""
