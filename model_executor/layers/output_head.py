"""The output head with the last norm before it: from the residual stream to logits, or to the most probable tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from .layernorm import RMSNorm
from .linear import float32_logits
from .residual import Layer, Stream, add_and_normalise


def cap_logits(logits: torch.Tensor, cap: float) -> None:
    """Change logits in place to cap * tanh(logits / cap)."""
    logits.div_(cap).tanh_().mul_(cap)


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

    def __init__(
        self,
        norm: RMSNorm,
        layer: Layer,
        soft_cap: float | None = None,
        *,
        cap_logits: Callable[[torch.Tensor, float], None] = cap_logits,
    ) -> None:
        """`soft_cap`: that of the logits; None: they have none. `cap_logits`: does what the function of this name does.

        Logits are capped in float32, before anything reads them.
        """
        self._norm = norm
        self._layer = layer
        self._soft_cap = soft_cap
        self._cap_logits = cap_logits

    def normalise(self, stream: Stream) -> torch.Tensor:
        return add_and_normalise(self._norm, *stream)[0]

    def of_hidden(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._capped(float32_logits(self._layer, hidden, out))

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        if self._soft_cap is not None:
            self._cap_logits(logits, self._soft_cap)
        return logits

    def __call__(self, stream: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.of_hidden(self.normalise(stream), out)


@runtime_checkable
class GreedyLayer(Layer, Protocol):
    """The layer of an output head that can keep only the largest logit of each row."""

    def argmax(self, x: torch.Tensor, soft_cap: float | None = None) -> torch.Tensor:
        """The first most probable token of each row, int64 [n]; INVALID_TOKEN if its logits are invalid.

        `soft_cap`: that of the logits. It may make several of the largest equal.
        """


class GreedyHead(PlainHead):
    """A PlainHead that computes the most probable tokens without writing logits."""

    def __init__(
        self,
        norm: RMSNorm,
        layer: GreedyLayer,
        soft_cap: float | None,
        *,
        cap_logits: Callable[[torch.Tensor, float], None],
    ) -> None:
        super().__init__(norm, layer, soft_cap, cap_logits=cap_logits)
        self.greedy = partial(layer.argmax, soft_cap=soft_cap)
        """the tokens of hidden states [n, hidden]"""
