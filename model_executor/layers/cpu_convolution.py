"""The short convolution on the compiled CPU operation (csrc/cpu/convolution_ops.h)."""

from __future__ import annotations

from typing import Any

import torch

from ..forward_batch import ForwardBatch
from .short_convolution import ConvolutionWeights


class CpuShortConvolution:
    """`ShortConvolution` in one operation."""

    def __init__(self, stored: torch.Tensor, weights: ConvolutionWeights) -> None:
        self._stored = stored
        self._weight, self._bias = weights.by_token(), weights.float_bias()

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        return torch.ops.tercet_cpu.short_convolution(
            projected, self._weight, self._bias, batch.positions, batch.out_cache_loc, batch.req_to_token, batch.rows,
            batch.extend_start_loc, self._stored,
        )  # fmt: skip
