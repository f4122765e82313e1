"""The attention backend of CPUs: one compiled operation for prefill, decode and both at once (csrc/cpu/attention.h)."""

from __future__ import annotations

import torch

from ..forward_batch import ForwardBatch
from .base import AttentionBackend


class CpuAttentionBackend(AttentionBackend):
    """A token's result does not depend, bit for bit, on the rest of the batch, on chunks or on what was cached."""

    name = "cpu"

    def plan(self, batch: ForwardBatch) -> None:
        """Nothing: the operation takes the batch as it is."""

    def attend(self, q: torch.Tensor, layer_id: int, batch: ForwardBatch) -> torch.Tensor:
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
        )
