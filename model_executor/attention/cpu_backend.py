"""The attention backend of CPUs: one compiled operation for prefill, decode and mixed steps (csrc/cpu/attention.h)."""

from __future__ import annotations

import torch

from ..forward_batch import ForwardBatch
from .base import AttentionBackend


class CpuAttentionBackend(AttentionBackend):
    """Attention by the compiled operation.

    The bits of a token's result do not depend on the other requests of the batch, on the chunks or on the cached
    prefix.
    """

    name = "cpu"

    def plan(self, batch: ForwardBatch) -> None:
        """Does nothing: the operation makes its own plan."""

    def attend(
        self, q: torch.Tensor, layer_id: int, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._check_sinks(layer_id, sinks)
        return torch.ops.tercet_cpu.attention(
            q,
            self.kv_pool.k_buffer[layer_id],
            self.kv_pool.v_buffer[layer_id],
            batch.req_to_token,
            batch.rows,
            batch.seq_lens,
            batch.extend_start_loc,
            self.sliding_windows[layer_id],
            self.scales[layer_id],
            sinks,
            self.soft_caps[layer_id],
        )
