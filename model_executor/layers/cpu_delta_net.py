"""The Gated DeltaNet on the compiled CPU operation (csrc/cpu/delta_net_ops.h)."""

from __future__ import annotations

from typing import Any

import torch

from ..forward_batch import ForwardBatch
from .delta_net import DeltaNet


class CpuDeltaNet(DeltaNet):
    """`DeltaNet` in one operation. A token has the same bits in any batch and chunk."""

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        saved_lens, saved_rows = batch.saved_states or (None, None)
        return torch.ops.tercet_cpu.delta_net(
            projected, self._convolution, self._decay_rate, self._decay_bias, self._norm, self._eps,
            self._sizes.num_key_heads, batch.positions, batch.rows, batch.extend_start_loc, saved_lens, saved_rows,
            self._states.recent, self._states.matrices,
        )  # fmt: skip
