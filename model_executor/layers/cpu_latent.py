"""Latent attention on the compiled CPU operations (csrc/cpu/latent_ops.h)."""

from __future__ import annotations

from typing import Any

import torch

from ...srt.model_files.latent_config import LatentConfig
from ..attention.base import AttentionBackend
from ..forward_batch import ForwardBatch
from .latent_attention import LatentLayers
from .packing import on_huge_pages, panels_of

_ops = torch.ops.tercet_cpu


class CpuLatentAttention:
    """`LatentAttention` on three operations beside attention: the linear layers of all heads, before and after it, and
    the norm of latents with the rotation and the store of keys."""

    def __init__(self, layer_id: int, backend: AttentionBackend, sizes: LatentConfig, layers: LatentLayers) -> None:
        self._layer_id = layer_id
        self._backend = backend
        self._sizes = sizes
        self._kv_norm, self._query_norm, self._query_proj = layers.kv_norm, layers.query_norm, layers.query_proj
        to_keys, to_values = layers.kv_b.split((sizes.nope_dim, sizes.value_dim), 1)
        self._absorb_keys, self._absorb_values = _packed(to_keys.transpose(1, 2)), _packed(to_values)
        self._k, self._v = backend.kv_pool.k_buffer[layer_id], backend.kv_pool.v_buffer[layer_id]

    def __call__(self, projected: torch.Tensor, rotation: Any, batch: ForwardBatch) -> torch.Tensor:
        sizes, num_heads = self._sizes, self._backend.num_heads
        num_tokens, latent_dim = len(projected), sizes.latent_dim
        queries, keys = projected.split((projected.shape[1] - sizes.key_dim, sizes.key_dim), 1)
        if self._query_proj is not None:
            assert self._query_norm is not None
            queries = self._query_proj(self._query_norm(queries), batch)
        queries = queries.unflatten(1, (num_heads, sizes.query_dim))
        nope, rope = queries.split((sizes.nope_dim, sizes.rope_dim), 2)
        q = _ops.head_linear(nope, self._absorb_keys, latent_dim, sizes.rope_dim)
        cos_sin, positions, _ = rotation
        _ops.rotate_and_store_latent(
            rope, q[..., latent_dim:], keys, positions, batch.out_cache_loc, cos_sin, self._kv_norm.weight,
            self._kv_norm.eps, self._k, self._v,
        )  # fmt: skip
        attended = self._backend.attend(q, self._layer_id, batch).view(num_tokens, num_heads, latent_dim)
        return _ops.head_linear(attended, self._absorb_values, sizes.value_dim).view(num_tokens, -1)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """The panels of the weights [heads, out, in] of all heads, one head after another."""
    return on_huge_pages(torch.stack([panels_of(of_head.contiguous()) for of_head in weight]))
