"""Triton attention of latent heads (MLA): the pool holds keys only, and values are parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ...srt.errors import ModelNotSupported
from ..forward_batch import ForwardBatch
from ..kernels.latent_attention import latent_decode_attention, latent_extend_attention
from ..kernels.store_kv import store_kv
from ..kernels.tuning import DecodeTile, ExtendTile, latent_decode_tile, latent_extend_tile
from ..kernels.work_map import WorkMap
from .base import AttentionSpec
from .triton_backend import DecodeLaunch, TritonAttentionBackend


class LatentAttentionBackend(TritonAttentionBackend):
    """Plans steps as TritonAttentionBackend does, and launches the kernels of latent attention."""

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: TokenToKVPool) -> None:
        super().__init__(specs, kv_pool)
        if any(spec.window is not None for spec in specs):
            raise ModelNotSupported("latent attention has no kernel for sliding windows")
        if any(spec.has_sinks for spec in specs):
            raise ModelNotSupported("latent attention has no kernel for attention sinks")
        if any(spec.soft_cap is not None for spec in specs):
            raise ModelNotSupported("latent attention has no kernel for soft caps of scores")

    def _tiles(self, arch: str) -> tuple[DecodeTile, ExtendTile]:
        page_size = self.kv_pool.page_size
        return latent_decode_tile(arch, self.num_heads, page_size), latent_extend_tile(arch, page_size)

    def _store(self, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ForwardBatch) -> None:
        store_kv(k, None, self.kv_pool.k_buffer[layer_id], None, batch.out_cache_loc)

    def _decode(
        self,
        q: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        sinks: torch.Tensor | None,
        launch: DecodeLaunch,
        out: torch.Tensor,
    ) -> None:
        latent_decode_attention(
            q, self.kv_pool.k_buffer[layer_id], self.attended_dim, batch.req_to_token, launch.rows, launch.seq_lens,
            launch.work, out, sm_scale=self.scales[layer_id], q_loc=launch.q_loc, tile=self._decode_tile,
        )  # fmt: skip

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
        assert batch.extend_start_loc is not None and batch.prefix_lens is not None
        latent_extend_attention(
            q, self.kv_pool.k_buffer[layer_id], self.attended_dim, batch.req_to_token, batch.rows,
            batch.extend_start_loc, batch.prefix_lens, work, out, longest=longest, sm_scale=self.scales[layer_id],
            tile=self._extend_tile,
        )  # fmt: skip

    def can_fuse(self, batch: ForwardBatch, dtype: torch.dtype) -> bool:
        return False
