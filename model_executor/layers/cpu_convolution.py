"""The short convolution on the compiled CPU operation (csrc/cpu/convolution_ops.h)."""

from __future__ import annotations

from typing import Any

import torch

from ..forward_batch import ForwardBatch
from .short_convolution import ShortConvolution


class CpuShortConvolution(ShortConvolution):
    """`ShortConvolution` in one operation."""

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        return torch.ops.tercet_cpu.short_convolution(
            projected, self._weight, self._bias, batch.positions, batch.out_cache_loc, batch.req_to_token, batch.rows,
            batch.extend_start_loc, self._stored,
        )  # fmt: skip
