"""The gated short convolution of LFM2 (arXiv 2511.23404) in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..forward_batch import ForwardBatch


class ConvolutionWeights(NamedTuple):
    """The weights of a convolution."""

    weight: torch.Tensor
    """[channels, 1, width], those of the oldest token first"""
    bias: torch.Tensor | None
    """[channels]; None: there is none"""

    def by_token(self) -> torch.Tensor:
        """The weights of each token, the oldest first, float32 [width, channels]."""
        return self.weight.flatten(1).t().float().contiguous()

    def float_bias(self) -> torch.Tensor | None:
        """The bias in float32; None: there is none."""
        return None if self.bias is None else self.bias.float()


class ShortConvolution:
    """The convolution between two linear layers: [T, 3 * channels] -> [T, channels].

    A token stores the product of the first and the third vector in the pool. It reads those of the tokens before it
    there, so a cached prefix serves as in attention. Tokens before position 0 count as zeros.
    """

    def __init__(self, stored: torch.Tensor, weights: ConvolutionWeights) -> None:
        """`stored`: a `TokenToKVPool.conv_buffer`."""
        self._stored = stored
        self._weight, self._bias = weights.by_token(), weights.float_bias()

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        first, gate, last = projected.chunk(3, 1)
        self._stored[batch.out_cache_loc] = (first * last).to(self._stored.dtype)
        out = torch.zeros_like(gate, dtype=torch.float32) if self._bias is None else self._bias.expand_as(gate)
        rows, width = _rows_of_tokens(batch), len(self._weight)
        for index in range(width):
            positions = batch.positions - (width - 1 - index)
            slots = batch.req_to_token[rows, positions.clamp(min=0)]
            inputs = self._stored.index_select(0, slots).float()
            out = out + inputs.masked_fill_((positions < 0)[:, None], 0) * self._weight[index]
        return (out * gate).to(projected.dtype)


def _rows_of_tokens(batch: ForwardBatch) -> torch.Tensor:
    """The row of each token in `req_to_token`, int64 [T]."""
    if batch.extend_start_loc is None:
        return batch.rows
    return torch.repeat_interleave(batch.rows, batch.extend_start_loc.diff(), output_size=len(batch.positions))
