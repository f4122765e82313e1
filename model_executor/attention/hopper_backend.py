"""Triton attention whose prompts have a kernel for Hopper GPUs (`--hopper-prefill`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ...srt.errors import ModelNotSupported
from ..forward_batch import ForwardBatch
from ..kernels.hopper_extend import hopper_extend_attention
from ..kernels.tuning import HOPPER_TILE
from ..kernels.work_map import WorkMap
from .base import AttentionSpec
from .triton_backend import TritonAttentionBackend


class HopperAttentionBackend(TritonAttentionBackend):
    """Requests with several new tokens use `hopper_extend_attention`, and others what TritonAttentionBackend uses."""

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: TokenToKVPool) -> None:
        super().__init__(specs, kv_pool)
        if any(spec.window is not None for spec in specs):
            raise ModelNotSupported("--hopper-prefill has no kernel for sliding windows: leave it out")
        if any(spec.has_sinks for spec in specs):
            raise ModelNotSupported("--hopper-prefill has no kernel for attention sinks: leave it out")
        if any(spec.soft_cap is not None for spec in specs):
            raise ModelNotSupported("--hopper-prefill has no kernel for soft caps of scores: leave it out")
        self._extend_tile = HOPPER_TILE

    def _extend(
        self,
        q: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        sinks: torch.Tensor | None,
        work: WorkMap,
        longest: int,
        out: torch.Tensor,
    ) -> None:
        assert sinks is None
        assert batch.extend_start_loc is not None and batch.prefix_lens is not None
        hopper_extend_attention(
            q, self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id], batch.req_to_token, batch.rows,
            batch.extend_start_loc, batch.prefix_lens, work, out, sm_scale=self.scales[layer_id],
            page_size=self.kv_pool.page_size,
        )  # fmt: skip
